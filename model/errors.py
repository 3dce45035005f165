"""The error that reaches the user as one line."""


class UserError(Exception):
    """Bad input or a machine that cannot do it: one line that says what, where, and what would be right; the command
    exits with 2."""
