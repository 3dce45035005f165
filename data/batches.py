"""Rows out: documents packed into rows of T tokens, in an order that seed and epoch alone decide, with exact position.

    documents      ab|      c|       defg|           | ends a document: the tokenizer's eos
    rows, T = 6    a b | c | d       e f g | a b     one row a step: the second one goes on with the next epoch
    positions      0 1 2 0 1 0       0 1 2 3 0 1
    labels         b | - | - -       f g | - b -     - is -100

A document longer than the rest of its row goes on in the next one; each such piece attends to itself alone and its
positions begin at 0. No token is lost, none comes twice in an epoch. An end predicts nothing, neither does the last
token of a row. Borders travel as lengths: a document of one token has position 0 and is seen all the same.

The position is (epoch, stretch in the epoch's order, and where each row's reader is): no buffer waits beside it.
"""
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from data.sources import DataError, Source
from data.tokenizer import ByteTokenizer

MASKED = -100
# a single document is held out in part if the part is worth a loss
MIN_VALIDATION_BYTES = 256


@dataclasses.dataclass
class MicroBatch:
    """Rows that pass a layer together, flattened: int32 [N]; doc_start and doc_end are rows 0 to N of it.

    order: stable argsort of tokens. supervised: labels that are not -100.
    """
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_start: np.ndarray
    doc_end: np.ndarray
    order: np.ndarray
    supervised: int


@dataclasses.dataclass
class StepBatch:
    """The rows of one step, or of a validation: int32 [rows, T]; doc_start and doc_end within the row, 0 to T.

    supervised: labels that are not -100. num_tokens, sum_of_squares: of documents and of their pieces' lengths, padding
    left out. epoch: that of the last document taken for them, from 0.
    """
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_start: np.ndarray
    doc_end: np.ndarray
    supervised: int
    num_tokens: int
    sum_of_squares: int
    epoch: int

    def micro_batch(self, first_row: int, num_rows: int) -> MicroBatch:
        rows = slice(first_row, first_row + num_rows)
        tokens, labels = self.tokens[rows].ravel(), self.labels[rows].ravel()
        T = self.tokens.shape[1]
        begin = np.arange(len(tokens) // T, dtype=np.int32)[:, None] * T
        return MicroBatch(tokens, labels, self.positions[rows].ravel(), (self.doc_start[rows] + begin).ravel(),
                          (self.doc_end[rows] + begin).ravel(), _order(tokens), int((labels != MASKED).sum()))

    def groups(self, micro_rows: int, micro_batches: int) -> Iterator[list[MicroBatch]]:
        """All rows in micro-batches, at most `micro_batches` together; those together have equally many rows."""
        rows = len(self.tokens)
        whole = rows // micro_rows
        for i in range(0, whole, micro_batches):
            yield [self.micro_batch(j * micro_rows, micro_rows) for j in range(i, min(i + micro_batches, whole))]
        if rows % micro_rows:
            yield [self.micro_batch(whole * micro_rows, rows % micro_rows)]


def _order(tokens: np.ndarray) -> np.ndarray:
    # 16-bit keys are sorted by radix, ten times as fast
    keys = tokens.astype(np.uint16) if tokens.max() < 1 << 16 else tokens
    return np.argsort(keys, kind="stable").astype(np.int32)


def lay_out(tokens: np.ndarray, lengths: np.ndarray, T: int, padding: np.ndarray | None = None, epoch: int = 0) -> StepBatch:
    """Labels, positions and borders of tokens int32 [rows * T] that consist of pieces of these lengths.

    No piece crosses the end of a row. padding: bool, the pieces that are padding.
    """
    text = np.ones(len(lengths), bool) if padding is None else ~padding
    ends = np.cumsum(lengths)
    starts = ends - lengths
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends - 1] = MASKED
    labels[np.repeat(~text, lengths)] = MASKED
    row_begin = np.arange(len(tokens)) // T * T
    doc_start = np.repeat(starts, lengths)
    positions = np.arange(len(tokens)) - doc_start
    arrays = (labels, positions, doc_start - row_begin, np.repeat(ends, lengths) - row_begin)
    rows = [array.astype(np.int32, copy=False).reshape(-1, T) for array in (tokens, *arrays)]
    return StepBatch(*rows, supervised=int((lengths[text] - 1).sum()), num_tokens=int(lengths[text].sum()),
                     sum_of_squares=int(np.square(lengths[text], dtype=np.int64).sum()), epoch=epoch)


def one_document(tokens: Sequence[int]) -> MicroBatch:
    """A micro-batch that is one document, every token but the last supervised."""
    return lay_out(np.array(tokens, np.int32), np.array([len(tokens)]), len(tokens)).micro_batch(0, 1)


def split(source: Source, every: int = 50) -> tuple[Source, Source]:
    """(training, validation): every `every`-th document is held out, the last one if they are fewer.

    Of a single document the last 1/every is held out. Where that is less than MIN_VALIDATION_BYTES, validation is the
    training text and both say so in `validation_is_training_text`.
    """
    if len(source) > 1:
        held_out = np.zeros(len(source), bool)
        held_out[min(every, len(source)) - 1:: every] = True
        return _chosen(source, ~held_out), _chosen(source, held_out)
    begin, length = source.begins[0], source.lengths[0]
    cut = length - length // every
    # 10xxxxxx goes on with a character
    while cut < length and source.text[begin + cut] & 0xC0 == 0x80:
        cut += 1
    if length - cut < MIN_VALIDATION_BYTES:
        same = dataclasses.replace(source, validation_is_training_text=True)
        return same, same
    return (source.part(source.begins, np.array([cut]), source.names),
            source.part(source.begins + cut, np.array([length - cut]), source.names))


def _chosen(source: Source, mask: np.ndarray) -> Source:
    return source.part(source.begins[mask], source.lengths[mask], [source.names[i] for i in np.flatnonzero(mask)])


@dataclasses.dataclass
class _Pieces:
    """Stretches of documents: document, offset in it and length, int64 each; document -1 is padding."""
    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    @staticmethod
    def joined(parts: Sequence["_Pieces"]) -> "_Pieces":
        return _Pieces(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(_Pieces)))

    def cut(self, T: int) -> "_Pieces":
        """Cut where rows of T end."""
        ends = np.cumsum(self.length)
        starts = ends - self.length
        borders = np.union1d(ends, np.arange(T, ends[-1], T))
        begins = np.concatenate(([0], borders[:-1]))
        whole = np.searchsorted(ends, begins, side="right")
        return _Pieces(self.document[whole], self.offset[whole] + begins - starts[whole], borders - begins)


class _Tokens:
    """Encoded documents; their lengths count the end."""

    def __init__(self, documents: Source, tokenizer: ByteTokenizer, T: int):
        """DataError if rows of T tokens of these documents can hold nothing to predict."""
        self.ids, self.begins, lengths = tokenizer.encode_documents(documents)
        self.lengths, self.eos = lengths + 1, tokenizer.eos
        if T < 2:
            raise DataError(f"--seq {T}: nothing to predict in such a row; at least 2")
        if not lengths.any():
            raise DataError(f"nothing to predict: all documents ({len(documents)}) are empty; at least one has to hold text")

    def stretch(self, order: np.ndarray, ends: np.ndarray, document: int, offset: int, limit: int) -> _Pieces:
        """At most `limit` tokens of the documents in this order, from a position on. ends: cumulative lengths, in order."""
        begin = ends[document] - self.lengths[order[document]] + offset
        end = min(begin + limit, ends[-1])
        last = np.searchsorted(ends, end)
        chosen = order[document: last + 1]
        offsets = np.zeros(len(chosen), np.int64)
        offsets[0] = offset
        lengths = self.lengths[chosen] - offsets
        lengths[-1] -= ends[last] - end
        return _Pieces(chosen, offsets, lengths)

    def rows(self, pieces: _Pieces, T: int, epoch: int = 0) -> StepBatch:
        """Pieces that fill rows of T exactly."""
        ends, padding = np.cumsum(pieces.length), pieces.document < 0
        at = self.begins[pieces.document] + pieces.offset - (ends - pieces.length)
        # the end of a document is not among the ids: what lies in its place is overwritten
        tokens = self.ids.take(np.repeat(at, pieces.length) + np.arange(ends[-1]), mode="clip").astype(np.int32)
        complete = ~padding & (pieces.offset + pieces.length == self.lengths[pieces.document])
        tokens[ends[complete] - 1] = self.eos
        if padding.any():
            tokens[np.repeat(padding, pieces.length)] = self.eos
        return lay_out(tokens, pieces.length, T, padding, epoch)


class Batches:
    """Training rows without end: `next_rows` gives a step's, `state` and `load_state` the exact place.

    Each row of a step has a reader of its own, which reads a stretch to its end and then takes the next one of the epoch's
    order: a step's rows come from as many documents, not from one that fills them all. A stretch is a document, or a part
    of one that holds more than a row's share of all tokens: so the readers of a single long text are apart too.
    fingerprint: what a run has to have in common with the one it goes on with.
    """

    def __init__(self, documents: Source, tokenizer: ByteTokenizer, T: int, rows: int, seed: int, pack: bool = True):
        """T tokens a row, rows a step. pack: False gives every document rows of its own, filled up with padding.

        Raises DataError where nothing could ever be predicted.
        """
        if seed < 0:
            raise DataError(f"--seed {seed}: at least 0")
        self._tokens = _Tokens(documents, tokenizer, T)
        self._T, self._seed, self._pack, self._names = T, seed, pack, documents.names
        self.fingerprint = {"documents": len(documents), "tokens": int(self._tokens.lengths.sum()),
                            "sha256": documents.fingerprint, "tokenizer": tokenizer.fingerprint}
        self._cut_stretches(rows)
        # of each reader: stretch in the source's order and offset in it, or none before it takes one
        self._readers: list[tuple[int, int] | None] = [None] * rows
        self._begin_epoch(0)

    def _cut_stretches(self, rows: int) -> None:
        """Document, offset in it and length of each stretch. Whole rows, and a last one that is never an end alone."""
        lengths, T = self._tokens.lengths, self._T
        self._longest = longest = T * max(1, -(-int(lengths.sum()) // (rows * T)))
        parts = np.maximum(-(-(lengths - 1) // longest), 1)
        last = np.cumsum(parts) - 1
        self._documents = np.repeat(np.arange(len(lengths)), parts)
        self._begins = (np.arange(len(self._documents)) - np.repeat(last - parts + 1, parts)) * longest
        self._lengths = np.full(len(self._documents), longest)
        self._lengths[last] = lengths - self._begins[last]

    def next_rows(self) -> StepBatch:
        """The next step's rows."""
        pieces: list[tuple[int, int, int]] = []
        for reader in range(len(self._readers)):
            pieces += self._row(reader)
        self._drawn = pieces
        return self._tokens.rows(_Pieces(*np.array(pieces, np.int64).T), self._T, self._epoch)

    def drawn_from(self) -> list[str]:
        """Names of the documents that the rows drawn last hold pieces of."""
        return [self._names[document] for document in dict.fromkeys(document for document, _, _ in self._drawn) if document >= 0]

    def state(self) -> dict[str, Any]:
        """The position in front of the next row, to be written as JSON. stretch: the next one to be taken, in the epoch's
        order. readers: [stretch in the source's order, offset] or null."""
        return {"seed": self._seed, "epoch": self._epoch, "stretch": self._next, "longest": self._longest,
                "readers": [r and list(r) for r in self._readers], "fingerprint": self.fingerprint}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on at a position; DataError with the fields that differ if it is one of another order or other text."""
        was, now = ({"seed": s["seed"], "rows": len(s["readers"]), "longest stretch": s["longest"]} | s["fingerprint"]
                    for s in (state, self.state()))
        differ = [f"{name}: {was.get(name)} -> {now.get(name)}" for name in was | now if was.get(name) != now.get(name)]
        if differ:
            raise DataError(f"the position is of another run's data ({'; '.join(differ)}); go on with the same files, tokenizer, "
                            "seed and rows a step, as long")
        readers = [r and (int(r[0]), int(r[1])) for r in state["readers"]]
        lengths = self._lengths
        known = all(r is None or (0 <= r[0] < len(lengths) and 0 <= r[1] < lengths[r[0]]) for r in readers)
        if not known or not 0 <= state["stretch"] <= len(lengths):
            raise DataError(f"no such position in {len(lengths)} stretches: {state['stretch']}, readers {state['readers']}")
        self._begin_epoch(int(state["epoch"]))
        self._next, self._readers = int(state["stretch"]), readers

    def _begin_epoch(self, epoch: int) -> None:
        # raw bits, sorted: numpy promises these for ever, but not what Generator.permutation makes of them
        bits = np.random.PCG64([self._seed, epoch]).random_raw(len(self._lengths))
        self._order = np.argsort(bits, kind="stable")
        self._epoch, self._next = epoch, 0

    def _take(self) -> tuple[int, int]:
        """The next stretch of the order, from its first token."""
        if self._next == len(self._order):
            self._begin_epoch(self._epoch + 1)
        self._next += 1
        return int(self._order[self._next - 1]), 0

    def _row(self, reader: int) -> list[tuple[int, int, int]]:
        """(document, offset, length) of the pieces that fill the reader's next row; document -1 is padding."""
        pieces, missing = [], self._T
        while missing and (self._pack or not pieces):
            stretch, offset = self._readers[reader] or self._take()
            left = int(self._lengths[stretch]) - offset
            length = min(left, missing)
            if not self._pack and left == self._T + 1 and self._T > 2:
                # not T now and the end alone in a row of its own, in which nothing is supervised
                length = self._T - 1
            pieces.append((int(self._documents[stretch]), int(self._begins[stretch]) + offset, length))
            missing -= length
            self._readers[reader] = (stretch, offset + length) if length < left else None
        return pieces + [(-1, 0, missing)] * (missing > 0)


def evaluation_rows(documents: Source, tokenizer: ByteTokenizer, T: int, max_rows: int) -> StepBatch:
    """At most max_rows rows, the same in every run: the documents packed in their order, rows taken at even distances.

    The end of the last row may be padding, a document of its own. Raises DataError if no token of them is supervised.
    """
    tokens = _Tokens(documents, tokenizer, T)
    ends, order = np.cumsum(tokens.lengths), np.arange(len(documents))
    total = int(ends[-1])
    num_rows = -(-total // T)
    parts = []
    for row in np.linspace(0, num_rows - 1, min(max_rows, num_rows)).astype(np.int64):
        document = np.searchsorted(ends, row * T, side="right")
        parts.append(tokens.stretch(order, ends, document, row * T - (ends[document] - tokens.lengths[document]), T))
    missing = -sum(int(part.length.sum()) for part in parts) % T
    if missing:
        parts.append(_Pieces(*np.array([[-1], [0], [missing]])))
    rows = tokens.rows(_Pieces.joined(parts).cut(T), T)
    if rows.supervised == 0:
        raise DataError(f"{documents.names[0]}: held out for validation, with nothing to predict; it needs at least 2 tokens")
    return rows
