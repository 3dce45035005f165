"""Packing, borders, order and position, with the values of tests/cases/packing.json."""
import dataclasses
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from data.batches import MASKED, Batches, evaluation_rows, lay_out, one_document, split
from data.sources import DataError, Source, open_source
from data.tokenizer import ByteTokenizer
from tests.data.make import documents, of_lengths, pieces, same

CASES = Path(__file__).parents[1] / "cases"
PACKING = json.loads((CASES / "packing.json").read_text())
BYTES = ByteTokenizer()
E = BYTES.eos
PACK = pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])


def batches(source, T, rows, seed=1, pack=True):
    return Batches(source, BYTES, T, rows, seed, pack)


def borders(batch):
    """Row 0's, from doc_start and doc_end alone."""
    assert sorted({*batch.doc_start[0][1:]} - {0}) == sorted({*batch.doc_end[0]})[:-1]
    return [0, *sorted({*batch.doc_end[0].tolist()})]


def in_order(source, T):
    """All rows of the documents in their own order."""
    return evaluation_rows(source, BYTES, T, max_rows=1 << 20)


def test_LOSS7_document_ends():
    batch = in_order(documents(b"ab", b"c"), 5)
    a, b, c = b"abc"
    assert batch.tokens.tolist() == [[a, b, E, c, E]]
    assert batch.labels.tolist() == [[b, E, MASKED, E, MASKED]] and batch.supervised == 3


def test_LOSS7_the_last_token_of_a_row_predicts_nothing():
    batch = in_order(documents(b"abcdefg"), 4)
    assert batch.labels.tolist() == [[*b"bcd", MASKED], [*b"fg", E, MASKED]]


def test_POS1_labels_and_positions_restart_with_the_document():
    case = PACKING["two_documents"]
    batch = lay_out(np.array(sum(case["documents"], []), np.int32), np.array([3, 3]), T=6)
    assert batch.positions.tolist() == [case["positions"]] and batch.labels.tolist() == [case["labels"]]
    assert borders(batch) == case["boundaries"]


def test_POS2_boundaries():
    case = PACKING["short_documents"]
    batch = in_order(of_lengths(*case["lengths"]), 10)
    assert borders(batch) == case["boundaries"] != case["wrong_boundaries_from_falling_positions"]
    assert batch.positions.tolist() == [case["positions"]]
    assert batch.sum_of_squares == 1 + 16 + 1 + 1 + 9


def test_POS2_3000_documents_of_5():
    batch = in_order(of_lengths(*[5] * 3000), 15000)
    assert borders(batch) == list(range(0, 15001, 5)) and batch.supervised == 3000 * 4


def test_POS2_a_document_that_ends_at_a_tile_border():
    batch = in_order(of_lengths(128, 127, 1, 128), 256)
    assert pieces(batch) == [[1] * 127 + [E], [2] * 126 + [E], [E], [4] * 127 + [E], [E] * 128]
    assert batch.num_tokens == 384 and (batch.labels[1, 127:] == MASKED).all()


def test_a_micro_batch_has_global_borders_and_a_stable_order():
    batch = batches(of_lengths(3, 5, 2, 9, 4), 8, 6).next_rows()
    for first, num in [(0, 6), (2, 3), (5, 1)]:
        micro = batch.micro_batch(first, num)
        for i in range(num):
            row = slice(i * 8, i * 8 + 8)
            assert np.array_equal(micro.doc_start[row], batch.doc_start[first + i] + i * 8)
            assert np.array_equal(micro.doc_end[row], batch.doc_end[first + i] + i * 8)
            assert np.array_equal(micro.labels[row], batch.labels[first + i])
        # a row's place in its document is its position
        assert np.array_equal(np.arange(num * 8) - micro.doc_start, micro.positions)
        assert micro.order.tolist() == sorted(range(num * 8), key=lambda i: micro.tokens[i])
        assert micro.supervised == (micro.labels >= 0).sum()
        assert all(getattr(micro, f.name).dtype == np.int32 and getattr(micro, f.name).shape == (num * 8,)
                   for f in dataclasses.fields(micro) if f.name != "supervised")
    assert batch.supervised == sum(batch.micro_batch(i, 2).supervised for i in (0, 2, 4))


def test_the_order_is_right_for_tokens_over_16_bits():
    tokens = np.array([152063, 5, 65536, 0, 5, 152063], np.int32)
    assert lay_out(tokens, np.array([6]), 6).micro_batch(0, 1).order.tolist() == [3, 1, 4, 2, 0, 5]


def test_DATA6_little_data_repeats_and_counts_its_epochs(tmp_path):
    shutil.copy(CASES / "tiny.txt", tmp_path)
    text = (tmp_path / "tiny.txt").read_bytes()
    train, validation = split(open_source([str(tmp_path / "tiny.txt")]))
    assert train is validation and train.validation_is_training_text
    source = batches(train, 64, 8)
    steps = []
    for i in range(5):
        steps.append(source.next_rows())
        # a row holds three copies and more, each a document of its own
        assert all(len(piece) <= 21 for piece in pieces(steps[-1])) and len(pieces(steps[-1])) >= 8 * 4
        # every copy is an epoch, and each of the 8 rows has begun this many
        assert steps[-1].epoch == source.state()["epoch"] == 8 * -(-64 * (i + 1) // 21) - 1
    for row in np.concatenate([step.tokens for step in steps], 1).tolist():
        assert row == ([*text, E] * 16)[: 5 * 64]


@PACK
def test_LOSS2_nothing_to_predict_is_refused(pack):
    with pytest.raises(DataError, match="nothing to predict"):
        batches(of_lengths(1, 1, 1), 8, 2, pack=pack)
    with pytest.raises(DataError, match="--seq 1"):
        batches(of_lengths(9, 9), 1, 2, pack=pack)
    with pytest.raises(DataError, match="nothing to predict"):
        evaluation_rows(of_lengths(1, 1), BYTES, 8, 4)
    # two tokens, but a row ends between them
    with pytest.raises(DataError, match="0.txt: held out"):
        evaluation_rows(of_lengths(1, 2), BYTES, 2, 4)


def test_a_negative_seed_is_refused():
    with pytest.raises(DataError, match="--seed -1: at least 0"):
        batches(of_lengths(9), 4, 1, seed=-1)


def test_LOSS10_a_step_without_labels_says_so():
    counts = [batches(of_lengths(1, 1, 1, 1, 2), 2, 1, seed=seed).next_rows().supervised for seed in range(20)]
    assert set(counts) == {0, 1}


def test_DATA7_text_longer_than_a_row():
    case = PACKING["too_long"]
    batch = in_order(of_lengths(*case["lengths"]), case["seq"])
    assert batch.tokens.shape == (case["rows"], case["seq"])
    assert pieces(batch) == [[1] * 4, [1, E], [2, 2], [E], [3, E], [E]]
    assert batch.num_tokens == case["tokens"] and batch.tokens.size - batch.num_tokens == case["padding"]


@pytest.mark.parametrize("length", [16, 17, 80])
@PACK
def test_DATA7_every_token_once_an_epoch_and_in_order(length, pack):
    text = [bytes(range(k, k + length - 1)) for k in (0, 90, 170)]
    source = batches(documents(*text), 8, 1, pack=pack)
    got, orders = [], []
    while source.state()["epoch"] == 0:
        orders.append(source.state()["stretch"])
        batch = source.next_rows()
        # what is padding or of the next epoch stands behind
        got += batch.tokens.ravel()[: batch.num_tokens].tolist()
    got = got[: 3 * length]
    assert sorted(got) == sorted(sum(([*t, E] for t in text), []))
    cut = [got[i * length: (i + 1) * length] for i in range(3)]
    assert sorted(cut) == sorted([*t, E] for t in text) and orders == sorted(orders)


@PACK
def test_DATA8_the_packer_does_not_clog(pack):
    records = [json.loads(line)["text"].encode() for line in (CASES / "long_docs.jsonl").read_text().splitlines()]
    many = [b"x" * 32] * 200 + [b"short"]
    for texts in (records, many):
        source, tokens = batches(documents(*texts), 32, 4, pack=pack), 0
        places = []
        while source.state()["epoch"] < 2:
            places.append(source.state())
            batch = source.next_rows()
            tokens += batch.num_tokens
            assert ((batch.labels != MASKED).sum(1) > 0).all()
        order = [(p["epoch"], p["stretch"]) for p in places]
        assert order == sorted(order) and all(a != b for a, b in zip(places, places[1:], strict=False))
        # all of two epochs, but for what four readers have before them
        assert tokens >= 2 * sum(len(t) + 1 for t in texts) - 4 * max(len(t) + 1 for t in texts)


def test_DATA9_same_order():
    source = of_lengths(*range(2, 60))
    total = int(source.lengths.sum()) + 58

    def epochs(seed, T):
        """Tokens of epochs 0 and 1 under this seed, through one reader."""
        made, stream = batches(source, T, 1, seed), []
        while len(stream) < 2 * total:
            stream += made.next_rows().tokens.ravel().tolist()
        return stream[:total], stream[total: 2 * total]
    one = epochs(1, 16)
    assert one == epochs(1, 16) and one != epochs(2, 16)
    assert one[0] != one[1] and sorted(one[0]) == sorted(one[1])
    # the order is that of seed and epoch, whatever the rows are
    assert one == epochs(1, 23)
    assert epochs(2, 16)[0] != one[1]


def test_DATA9_every_reader_reads_documents_to_their_end():
    source = of_lengths(*range(20, 60))
    made = batches(source, 8, 3)
    steps = [made.next_rows() for _ in range(80)]
    rows = np.concatenate([step.tokens for step in steps], 1)
    assert all(same(a, b) for a, b in zip(steps[:1], [batches(source, 8, 3).next_rows()], strict=True))
    assert not same(steps[0], batches(source, 8, 3, seed=2).next_rows())
    begun = []
    for row in rows.tolist():
        text = bytes(t if t != E else 0 for t in row).split(b"\0")
        assert all(len(set(t)) == 1 and len(t) == t[0] + 18 for t in text[:-1])
        begun += [t[0] for t in text if t]
    # 40 documents an epoch, each begun once before one is begun again
    assert sorted(set(begun)) == list(range(1, 41)) and max(map(begun.count, begun)) - min(map(begun.count, begun)) <= 1


@PACK
def test_DATA9_the_rows_of_one_long_document_are_apart(pack):
    # the second one's end would be alone in a row
    for length in (1000, 1025, 100_003):
        text = np.random.default_rng(0).integers(97, 123, length - 1).astype(np.uint8).tobytes()
        made = batches(documents(text), 16, 4, pack=pack)
        rows, share = [[], [], [], []], -(-length // 64) * 16
        for _ in range(share // 16 + 1):
            state, batch = made.state(), made.next_rows()
            for row, tokens, borders in zip(rows, batch.tokens.tolist(), batch.doc_end.tolist(), strict=True):
                row += tokens if pack else tokens[: borders[0]]
            assert (batch.labels != MASKED).any(1).all()
        # each row first reads a part of the text, and together they read all of it
        parts = [[*text, E][i: i + share] for i in range(0, length, share)]
        heads = {tuple(part[:16]): part for part in parts}
        assert len(heads) == 4 and sorted(heads) == sorted(tuple(row[:16]) for row in rows)
        assert all(row[:len(heads[tuple(row[:16])])] == heads[tuple(row[:16])] for row in rows)
        resumed = batches(documents(text), 16, 4, pack=pack)
        resumed.load_state(state)
        assert same(resumed.next_rows(), batch)
        with pytest.raises(DataError, match="longest stretch: "):
            batches(documents(text), 1000, 4, pack=pack).load_state(state)


def test_DATA9_evaluating_changes_nothing():
    source = of_lengths(*range(2, 60))
    plain, disturbed = batches(source, 16, 3), batches(source, 16, 3)
    for _ in range(40):
        evaluation_rows(source, BYTES, 16, 4)
        np.random.seed(0), disturbed.state()
        assert same(plain.next_rows(), disturbed.next_rows())


@PACK
def test_CKPT9_position_in_later_epochs(pack):
    # rows of 8 and 125 steps an epoch, packed or not; two documents of each epoch are cut by a row
    source = of_lengths(*[8] * 121, 12, 20) if pack else of_lengths(*[8] * 123, 16)
    made, states, steps = batches(source, 8, 1, pack=pack), [], []
    for _ in range(260):
        states.append(json.loads(json.dumps(made.state())))
        steps.append(made.next_rows())
    # an epoch begins when its first document is taken
    assert [s["epoch"] for s in states] == [max(i - 1, 0) // 125 for i in range(260)]
    assert not same(steps[0], steps[125]) or not same(steps[1], steps[126])
    for stop in (124, 125, 126, 200, 250):
        resumed = batches(source, 8, 1, pack=pack)
        resumed.load_state(states[stop])
        assert resumed.state() == states[stop]
        assert all(same(resumed.next_rows(), steps[i]) for i in range(stop, stop + 10))


def test_CKPT10_position_packed():
    case = PACKING["resume"]
    # 3 tokens of text and the end: two documents a row
    source = of_lengths(*[case["length"] + 1] * case["documents"])
    made = batches(source, case["seq"], 1)
    for _ in range(case["rows_done"]):
        assert len(pieces(made.next_rows())) == case["documents_a_row"]
    state = made.state()
    assert state["stretch"] == case["next_document"] != case["wrong_rows_counted_as_documents"] and state["readers"] == [None]
    resumed = batches(source, case["seq"], 1)
    resumed.load_state(state)
    assert all(same(resumed.next_rows(), made.next_rows()) for _ in range(12))


@PACK
def test_CKPT10_every_stop_within_a_document(pack):
    source = of_lengths(3, 50, 1, 7, 2, 33, 4)
    made, states, steps = batches(source, 8, 2, pack=pack), [], []
    for _ in range(40):
        states.append(made.state())
        steps.append(made.next_rows())
    assert any(reader and reader[1] for s in states for reader in s["readers"])
    for i, state in enumerate(states):
        resumed = batches(source, 8, 2, pack=pack)
        resumed.load_state(state)
        assert same(resumed.next_rows(), steps[i])


def test_CKPT12_a_position_of_other_data_is_refused():
    state = batches(documents(b"abc", b"defg"), 8, 2, seed=1).state()
    with pytest.raises(DataError, match=r"\(seed: 1 -> 2\)"):
        batches(documents(b"abc", b"defg"), 8, 2, seed=2).load_state(state)
    with pytest.raises(DataError, match="sha256") as refused:
        batches(documents(b"abc", b"defh"), 8, 2).load_state(state)
    assert "seed:" not in str(refused.value) and "tokens:" not in str(refused.value)
    with pytest.raises(DataError, match=r"documents: 2 -> 3; tokens: 9 -> 11"):
        batches(documents(b"abc", b"defg", b"h"), 8, 2).load_state(state)
    with pytest.raises(DataError, match=r"\(rows: 2 -> 3\)"):
        batches(documents(b"abc", b"defg"), 8, 3).load_state(state)
    # the same files and rows of another length: the position holds
    batches(documents(b"abc", b"defg"), 4, 2).load_state(state)
    for wrong in ({"stretch": 3}, {"stretch": -1}, {"readers": [[0, 4], None]}, {"readers": [[2, 0], None]}):
        with pytest.raises(DataError, match="no such position"):
            batches(documents(b"abc", b"defg"), 8, 2).load_state(state | wrong)


def test_OPT1_without_packing_a_row_holds_one_document_and_padding():
    batch = batches(of_lengths(5), 8, 2, pack=False).next_rows()
    row = [1, 1, 1, 1, E, E, E, E]
    assert batch.tokens.tolist() == [row, row]
    assert batch.labels.tolist() == [[1, 1, 1, E] + [MASKED] * 4] * 2 and batch.supervised == 8
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 2
    assert batch.doc_start.tolist() == [[0] * 5 + [5] * 3] * 2 and batch.doc_end.tolist() == [[5] * 5 + [8] * 3] * 2
    # padding is no token and no work
    assert batch.num_tokens == 10 and batch.sum_of_squares == 50 and batch.epoch == 1


def test_every_50th_document_is_held_out():
    source = of_lengths(*range(2, 122))
    train, validation = split(source)
    assert validation.names == ["49.txt", "99.txt"] and len(train) == 118
    assert validation.document(1) == source.document(99) and train.document(98) == source.document(100)
    assert not set(train.names) & set(validation.names) and not train.validation_is_training_text
    assert len({source.fingerprint, train.fingerprint, validation.fingerprint}) == 3
    few, last = split(documents(b"ab", b"cd", b"ef"))
    assert last.names == ["2.txt"] and few.names == ["0.txt", "1.txt"]


def test_a_change_in_what_is_held_out_changes_the_fingerprint_of_training():
    one, other = (split(documents(b"ab", b"cd", end))[0] for end in (b"ef", b"eg"))
    assert one.document(1) == other.document(1) and one.fingerprint != other.fingerprint


def test_of_one_document_the_end_is_held_out_between_two_characters():
    # a fiftieth of it, 601 bytes, begins inside a character
    text = ("日" * 10020).encode()
    train, validation = split(documents(text))
    assert train.document(0) + validation.document(0) == text
    assert train.document(0).decode() and len(validation.document(0)) == 600 and validation.document(0).decode()
    assert not train.validation_is_training_text


def test_evaluation_rows_are_spread_and_the_same_each_time():
    source = of_lengths(*[10] * 100)
    rows = evaluation_rows(source, BYTES, 20, 5)
    assert same(rows, evaluation_rows(source, BYTES, 20, 5)) and rows.tokens.shape == (5, 20)
    assert [int(row[0]) for row in rows.tokens] == [1, 25, 49, 73, 99]
    assert evaluation_rows(source, BYTES, 7, 1000).num_tokens == 1000


def test_groups_hold_every_row_once_and_equally_many_together():
    rows = evaluation_rows(of_lengths(*range(2, 40)), BYTES, 16, 11)
    groups = list(rows.groups(micro_rows=2, micro_batches=3))
    assert [[len(m.tokens) // 16 for m in group] for group in groups] == [[2, 2, 2], [2, 2], [1]]
    assert np.array_equal(np.concatenate([m.tokens for group in groups for m in group]), rows.tokens.ravel())
    assert sum(m.supervised for group in groups for m in group) == rows.supervised


def test_one_document_is_a_micro_batch():
    micro = one_document([7, 5, 6])
    assert micro.labels.tolist() == [5, 6, MASKED] and micro.doc_end.tolist() == [3, 3, 3]
    assert micro.positions.tolist() == [0, 1, 2] and micro.order.tolist() == [1, 2, 0] and micro.supervised == 2


@PACK
@pytest.mark.parametrize("T", [2, 127, 128, 129, 8191])
def test_POS7_lengths(T, pack):
    batch = batches(of_lengths(127, 128, 129, 8191, 20000), T, 3, pack=pack).next_rows()
    assert batch.tokens.shape == (3, T) and (batch.labels[:, -1] == MASKED).all()
    rows = np.arange(T)
    assert np.array_equal(batch.positions, rows - batch.doc_start) and (batch.doc_end > rows).all() and batch.doc_end.max() == T
    inside = batch.doc_end - 1 > rows
    if pack:
        assert np.array_equal(batch.labels[inside], batch.tokens[:, 1:][inside[:, :-1]])
        assert (batch.labels[~inside] == MASKED).all()


def test_rows_name_the_documents_that_they_were_drawn_from():
    made = batches(of_lengths(3, 3, 40), 2, 1, pack=False)
    drawn = []
    for _ in range(30):
        first = made.next_rows().tokens[0, 0]
        assert first == E or made.drawn_from() == [f"{first - 1}.txt"]
        drawn += made.drawn_from()
    assert {*drawn} == {"0.txt", "1.txt", "2.txt"}


def test_the_standard_library_is_ready_within_a_second():
    began = time.perf_counter()
    train, validation = split(open_source(None))
    batches(train, 256, 16).next_rows()
    evaluation_rows(validation, BYTES, 256, 64)
    assert time.perf_counter() - began < 1.0


def test_a_million_documents_are_split_within_a_second():
    began = time.perf_counter()
    source = Source(np.full(4_000_000, 97, np.uint8), np.arange(1_000_000) * 4, np.full(1_000_000, 4), ["a.txt"] * 1_000_000, "")
    train, validation = split(source)
    assert len(validation) == 20_000 and len(train) == 980_000 and time.perf_counter() - began < 1.0


def test_a_step_of_32k_tokens_is_drawn_within_5_ms():
    rng = np.random.default_rng(0)
    made = batches(of_lengths(*rng.integers(2, 4000, 2000).tolist()), 4096, 8)
    made.next_rows()
    times = []
    for _ in range(10):
        began = time.perf_counter()
        batch = made.next_rows()
        list(batch.groups(2, 4))
        times.append(time.perf_counter() - began)
    assert min(times) < 0.005
