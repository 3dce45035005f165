"""Packed rows of tokens, in an order that seed and epoch alone decide, with an exact position to resume from.

    documents   ab | c      tokens  a  b  E  c  E       E ends a document and predicts nothing
                            labels  b  E  -  E  -       - is -100: masked

Documents follow each other in the epoch's order; a row is cut where it is full, and the rest of a document goes on in
the next row as a piece of its own: it does not see what came before, and the last token of a row predicts nothing.
No token is lost and none comes twice. Boundaries travel with the tokens; nothing infers them from positions.
"""
import dataclasses
from collections.abc import Iterator

import numpy as np

from data.sources import DataError, Document, fingerprint
from data.tokenizer import ByteTokenizer

MASKED = -100


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows one after the other, int32 [rows * T] each; row indices of documents count from its first token.

    Token i attends to doc_start[i] .. i; its document ends before doc_end[i]. order: stable argsort of tokens.
    """
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_start: np.ndarray
    doc_end: np.ndarray
    order: np.ndarray


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a step or of an evaluation, int32 [rows, T] each; doc_start, doc_end count within the row.

    epoch: 0 is the first. names: documents that have a token here.
    """
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_start: np.ndarray
    doc_end: np.ndarray
    epoch: int
    names: tuple[str, ...]

    @property
    def supervised(self) -> int:
        """Tokens with a label."""
        return int((self.labels != MASKED).sum())

    @property
    def sum_of_squares(self) -> int:
        """Of the lengths of all documents' pieces: what attention's cost goes by."""
        return int((self.doc_end - self.doc_start).sum(dtype=np.int64))

    def micro_batch(self, first: int, count: int) -> MicroBatch:
        """Rows first .. first + count as one micro-batch."""
        rows = slice(first, first + count)
        offset = (np.arange(count, dtype=np.int32) * self.tokens.shape[1])[:, None]
        tokens = self.tokens[rows].ravel()
        return MicroBatch(tokens, self.labels[rows].ravel(), self.positions[rows].ravel(), (self.doc_start[rows] + offset).ravel(),
                          (self.doc_end[rows] + offset).ravel(), np.argsort(tokens, kind="stable").astype(np.int32))

    def groups(self, micro_rows: int, micro_batches: int) -> Iterator[list[MicroBatch]]:
        """All rows, in groups of at most that many micro-batches of equal size."""
        total = len(self.tokens)
        whole = [self.micro_batch(i, micro_rows) for i in range(0, total - micro_rows + 1, micro_rows)]
        yield from (whole[i:i + micro_batches] for i in range(0, len(whole), micro_batches))
        if rest := total % micro_rows:
            yield [self.micro_batch(total - rest, rest)]


class Batches:
    """Steps of `rows` rows of T tokens, epoch after epoch."""

    def __init__(self, documents: list[Document], tokenizer: ByteTokenizer, T: int, rows: int, seed: int, pack: bool = True):
        """pack: documents follow each other in a row; else each row holds a piece of one document and padding. DataError
        if no token could predict another."""
        self.documents, self.T, self.rows, self.seed, self.pack = documents, T, rows, seed, pack
        self.eos = tokenizer.eos
        self._tokens = [np.append(tokenizer.encode(d.text), np.int32(self.eos)) for d in documents]
        self.fingerprint = fingerprint(documents)
        if T < 2 or all(len(tokens) < 2 for tokens in self._tokens):
            raise DataError(f"nothing to predict: rows of {T} tokens, the longest document has "
                            f"{max(map(len, self._tokens), default=0)} with its end; at least 2 of each are needed")
        self.epoch = self.index = self.offset = 0
        self._order = self._shuffled()

    def next_rows(self) -> Rows:
        """The rows of the next step; its epoch is that of its first token."""
        epoch = self.epoch
        return _assemble([self._next_row() for _ in range(self.rows)], self.T, self.eos, epoch)

    def state(self) -> dict:
        """What `load_state` needs to go on with the next row."""
        return {"seed": self.seed, "data": self.fingerprint, "pack": self.pack, "epoch": self.epoch, "document": self.index,
                "offset": self.offset}

    def load_state(self, state: dict) -> None:
        """Goes on where `state` was taken. DataError, with the fields that differ, if that was another text or order."""
        mine = self.state()
        differ = [f"{name}: {state.get(name)} -> {mine[name]}" for name in ("seed", "data", "pack") if state.get(name) != mine[name]]
        if differ:
            raise DataError(f"the data position belongs to another order of documents: {'; '.join(differ)}")
        self.epoch, self.index, self.offset = state["epoch"], state["document"], state["offset"]
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.documents))

    def _next_row(self) -> list[tuple[np.ndarray, str]]:
        """Pieces that fill a row: (tokens, name of the document)."""
        pieces, room = [], self.T
        while room:
            which = self._order[self.index]
            piece = self._tokens[which][self.offset:self.offset + room]
            pieces.append((piece, self.documents[which].name))
            room -= len(piece)
            self.offset += len(piece)
            if self.offset == len(self._tokens[which]):
                self._next_document()
            if not self.pack:
                break
        return pieces

    def _next_document(self) -> None:
        self.index, self.offset = self.index + 1, 0
        if self.index == len(self.documents):
            self.epoch, self.index = self.epoch + 1, 0
            self._order = self._shuffled()


def evaluation_rows(documents: list[Document], tokenizer: ByteTokenizer, T: int, max_rows: int) -> Rows:
    """The first `max_rows` rows of the documents, in order, packed; the rest of the last row is padding."""
    rows, room = [[]], T
    for document in documents:
        tokens = np.append(tokenizer.encode(document.text), np.int32(tokenizer.eos))
        while len(tokens):
            if not room:
                if len(rows) == max_rows:
                    return _assemble(rows, T, tokenizer.eos, 0)
                rows, room = [*rows, []], T
            rows[-1].append((tokens[:room], document.name))
            tokens, room = tokens[room:], room - len(tokens[:room])
    return _assemble(rows, T, tokenizer.eos, 0)


def one_document(tokens: list[int]) -> MicroBatch:
    """A row of its own, nothing supervised: what sampling reads."""
    row = _assemble([[(np.array(tokens, np.int32), "")]], len(tokens), eos=0, epoch=0)
    return dataclasses.replace(row.micro_batch(0, 1), labels=np.full(len(tokens), MASKED, np.int32))


def _assemble(rows: list[list[tuple[np.ndarray, str]]], T: int, eos: int, epoch: int) -> Rows:
    """Rows of pieces as arrays; what a row leaves free is padding, a document of its own without labels."""
    made = Rows(*(np.empty((len(rows), T), np.int32) for _ in range(5)), epoch,
                tuple(dict.fromkeys(name for row in rows for _, name in row)))
    for r, pieces in enumerate(rows):
        lengths = [len(tokens) for tokens, _ in pieces]
        used = sum(lengths)
        made.tokens[r, :used] = np.concatenate([tokens for tokens, _ in pieces])
        made.tokens[r, used:] = eos
        if used < T:
            lengths.append(T - used)
        ends = np.cumsum(lengths)
        made.doc_end[r] = np.repeat(ends, lengths)
        made.doc_start[r] = np.repeat(ends - lengths, lengths)
        made.positions[r] = np.arange(T) - made.doc_start[r]
        made.labels[r, :-1] = made.tokens[r, 1:]
        # a piece's last token: the document's end, or the row's
        made.labels[r, ends - 1] = MASKED
        made.labels[r, used:] = MASKED
    return made
