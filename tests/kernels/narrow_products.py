"""Which products in a kernel's pointer offsets are taken in int32 and may pass 2^31; found in the source, nothing runs.

Walks from each pointer (first argument of a load, a store, an atomic or a descriptor) back through names, loops and
conditionals, and asks how large each factor on the way may be:

    SMALL   at most a row: a constexpr, tl.arange, a remainder by a constexpr, and what is made of these
    INDEX   counts rows, tiles or programs: a program id, an argument, a loop variable, what was loaded. Fits int32
    WIDE    int64: .to(tl.int64) or tl.cast(..., tl.int64), and what is made with one

SMALL x SMALL is a column. INDEX x tile (a constexpr BM, BLOCK, CHUNK, ...) is a row, but not in a kernel with an argument n: that
counts the elements of a whole buffer. Any other product needs a WIDE factor before it is taken; widening it later is too late.
A descriptor takes rows and columns as they are, and its strides in int64; where a loop ends is no offset.
"""
import ast
import re
from enum import IntEnum

TILE = re.compile(r"B[A-Z]|BLOCK|CHUNK")
MODULES = {"tl", "gl"}
ACCESSES = re.compile(r"load|store|atomic_\w+|make_tensor_descriptor|make_block_ptr")


class Size(IntEnum):
    SMALL = 0
    INDEX = 1
    WIDE = 2


def _name(node: ast.AST) -> str:
    """Last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_int64(node: ast.AST) -> bool:
    return _name(node) == "int64"


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(_name(d.func if isinstance(d, ast.Call) else d) == "jit" for d in function.decorator_list)


class Kernel:
    """One jitted function: what each name may be, and the products that its pointers are made of."""

    def __init__(self, function: ast.FunctionDef, constants: set[str]):
        self.found, self.open = {}, set()
        arguments = function.args.args + function.args.kwonlyargs
        self.whole_buffer = any(a.arg == "n" for a in arguments)
        self.constants = constants | {a.arg for a in arguments if a.annotation is not None and _name(a.annotation) == "constexpr"}
        # names that are given a value: every value that they are given
        self.values: dict[str, list[ast.AST]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._bind(node.target, node.value)
                if _name(node.annotation) == "constexpr":
                    self.constants.add(_name(node.target))
            elif isinstance(node, ast.AugAssign):
                self._bind(node.target, ast.BinOp(ast.Name(_name(node.target)), node.op, node.value, lineno=node.lineno))
            elif isinstance(node, ast.For):
                self._bind(node.target, node.iter)
        for node in ast.walk(function):
            # a descriptor's own load and store take rows and columns
            if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ACCESSES.fullmatch(node.func.attr)
                    and _name(node.func.value) in MODULES):
                self.size(node.args[0])

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Tuple):
            pairs = zip(target.elts, value.elts, strict=True) if isinstance(value, ast.Tuple) else ((t, value) for t in target.elts)
            for part, its_value in pairs:
                self._bind(part, its_value)
        elif isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)

    def size(self, node: ast.AST) -> Size:
        """How large `node` may be; products that are not safe are collected on the way."""
        match node:
            case ast.Constant():
                return Size.SMALL
            case ast.Name():
                return self._size_of_name(node.id)
            case ast.BinOp():
                return self._size_of_operation(node)
            case ast.UnaryOp():
                return self.size(node.operand)
            case ast.Subscript():
                return self.size(node.value)
            case ast.IfExp():
                return self._joined([node.body, node.orelse])
            case ast.Call():
                return self._size_of_call(node)
        return Size.INDEX

    def _joined(self, nodes: list[ast.AST]) -> Size:
        """Of what may be any of `nodes`: int64 only if all are."""
        sizes = [self.size(node) for node in nodes]
        wide = all(size == Size.WIDE for size in sizes)
        return Size.WIDE if wide else min(max(sizes), Size.INDEX)

    def _size_of_name(self, name: str) -> Size:
        if name in self.constants:
            return Size.SMALL
        if name not in self.values:
            return Size.INDEX
        # a name made of itself is as large as the rest of what it is given
        if name in self.open:
            return Size.SMALL
        self.open.add(name)
        size = self._joined(self.values[name])
        self.open.discard(name)
        return size

    def _size_of_operation(self, node: ast.BinOp) -> Size:
        left, right = self.size(node.left), self.size(node.right)
        if isinstance(node.op, ast.Mod) and right == Size.SMALL:
            return Size.WIDE if left == Size.WIDE else Size.SMALL
        if isinstance(node.op, ast.Mult) and Size.WIDE not in (left, right) and Size.INDEX in (left, right):
            if self.whole_buffer or not any(_name(factor) in self.constants and TILE.fullmatch(_name(factor))
                                            for factor in (node.left, node.right)):
                self.found[ast.unparse(node)] = node.lineno
        return max(left, right)

    def _size_of_call(self, node: ast.Call) -> Size:
        name = _name(node.func)
        if name in ("range", "static_range"):
            starts = [self.size(a) for a in node.args[:-1][:1]]
            found = dict(self.found)
            ends = [self.size(a) for a in node.args[1:] or node.args]
            self.found = found
            return max(starts + ends)
        arguments = [self.size(a) for a in node.args]
        if name == "to" and isinstance(node.func, ast.Attribute):
            inner = self.size(node.func.value)
            if _is_int64(node.args[0]):
                return Size.WIDE
            # back to int32, or to a pointer, whose offsets are its own
            return min(inner, Size.INDEX)
        if name == "cast" and _is_int64(node.args[1]):
            return Size.WIDE
        if name == "arange":
            return Size.SMALL
        if name in ("min", "max", "minimum", "maximum", "cdiv"):
            return max(arguments)
        if name == "where":
            return self._joined(node.args[1:])
        if name in ("multiple_of", "max_contiguous", "broadcast_to", "expand_dims", "reshape"):
            return arguments[0]
        return Size.INDEX


def narrow_products(source: str) -> dict[tuple[str, str], int]:
    """(kernel, product as text) -> line, of all products in `source` that may pass 2^31 in int32 on their way to a pointer."""
    tree = ast.parse(source)
    # what a module names in capitals is known when a kernel is compiled
    constants = {t.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                 for t in ast.walk(target) if isinstance(t, ast.Name) and t.id.isupper()}
    return {(f.name, product): line for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and _is_kernel(f)
            for product, line in Kernel(f, constants).found.items()}
