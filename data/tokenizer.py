"""Bytes as tokens: 0 to 255 are themselves, 256 ends a document."""
import numpy as np


class ByteTokenizer:
    """vocab_size 257; nothing is added in front, EOS ends each document."""
    name = "bytes"
    vocab_size = 257
    eos = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """int32 tokens of the text's UTF-8, without EOS."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, tokens) -> str:
        """The text of the tokens; EOS is left out, bytes that are no UTF-8 are shown as U+FFFD."""
        return bytes(t for t in map(int, tokens) if t < self.eos).decode(errors="replace")
