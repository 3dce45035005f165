"""Bytes in, the same text out."""
import numpy as np
import pytest

from data.tokenizer import ByteTokenizer
from tests.data.make import documents

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize("text", ["", "plain", "tab\tand\r\n", "日本語 🙂 \u2028\x85", "\x00\x7f"])
def test_text_comes_back(text):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == list(text.encode()) and TOKENIZER.decode(ids) == text
    assert np.array_equal(TOKENIZER.encode(text.encode()), ids)


def test_decoding_leaves_ends_out_and_replaces_half_characters():
    assert TOKENIZER.decode([97, 256, 98, 300, 256]) == "ab"
    assert TOKENIZER.decode(TOKENIZER.encode("🙂")[:2]) == "\ufffd"


def test_every_id_is_below_vocab_size_and_the_end_is_no_byte():
    assert TOKENIZER.vocab_size == 257 and TOKENIZER.eos == 256
    assert TOKENIZER.encode(bytes(range(256))).max() < TOKENIZER.eos < TOKENIZER.vocab_size


def test_documents_are_encoded_without_a_copy():
    source = documents(b"ab", b"", b"cde")
    ids, begins, lengths = TOKENIZER.encode_documents(source)
    assert np.shares_memory(ids, source.text)
    for i in range(3):
        assert np.array_equal(ids[begins[i]:][:lengths[i]], TOKENIZER.encode(source.document(i)))
