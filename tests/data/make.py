"""Sources without files, and batches compared as what they hold."""
import dataclasses
import hashlib

import numpy as np

from data.batches import StepBatch
from data.sources import Source


def documents(*texts: bytes) -> Source:
    """A source that holds these documents."""
    lengths = np.array([len(text) for text in texts], np.int64)
    joined = b"".join(texts)
    names = [f"{i}.txt" for i in range(len(texts))]
    digest = hashlib.sha256(lengths.tobytes() + joined).hexdigest()
    return Source(np.frombuffer(joined, np.uint8), np.cumsum(lengths) - lengths, lengths, names, digest)


def of_lengths(*lengths: int) -> Source:
    """Documents of these many tokens with their ends; the first holds bytes of 1, the next of 2, and so on."""
    return documents(*(bytes([1 + i % 250]) * (n - 1) for i, n in enumerate(lengths)))


def same(a: StepBatch, b: StepBatch) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


def pieces(batch: StepBatch) -> list[list[int]]:
    """Tokens of every piece, row after row, by the borders alone."""
    return [row[s:e].tolist() for row, starts, ends in zip(batch.tokens, batch.doc_start, batch.doc_end, strict=True)
            for s, e in sorted(set(zip(starts.tolist(), ends.tolist(), strict=True)))]
