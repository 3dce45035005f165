"""Bytes as tokens: nothing to download, no text that it cannot write, and encoding costs nothing."""
import hashlib
from collections.abc import Iterable

import numpy as np

from data.sources import Source


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8, 256 ends a document."""
    name = "bytes"
    eos = 256
    vocab_size = 257
    # another number wherever the same text would give other ids
    fingerprint = hashlib.sha256(b"bytes 0-255, end 256").hexdigest()[:16]

    def encode(self, text: str | bytes) -> np.ndarray:
        """int32 ids, without the end of a document."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; ends of documents are left out, bytes that are no UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < self.eos).decode("utf-8", errors="replace")

    def encode_documents(self, documents: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, begins, lengths): document i is ids[begins[i]:][:lengths[i]], without its end; ids is a view of the text."""
        return documents.text, documents.begins, documents.lengths
