"""Gather and ordered scatter-add against F.embedding and its autograd."""
import pytest
import torch
import torch.nn.functional as F

from kernels.embedding import CHUNK, HEADS_TILE_CHUNKS, embedding, embedding_backward, embedding_partials_shape, embedding_ref
from tests.judge import judge

DTYPES = [torch.float32, torch.float16]


def order_of(tokens):
    return torch.argsort(tokens, stable=True).to(torch.int32)


def backward(dout, tokens, dw, empty):
    embedding_backward(dout, tokens, order_of(tokens), dw.data_ptr(), partials=empty(*embedding_partials_shape(*dout.shape)))
    return dw


def gradient(dout, tokens, V, embed):
    w = torch.zeros(V, dout.shape[1], dtype=dout.dtype, device=dout.device, requires_grad=True)
    return torch.autograd.grad(embed(tokens, w), w, dout)[0]


def peer_embedding(tokens, w):
    return F.embedding(tokens.long(), w)


def check_backward(tokens, D, V, dtype, device, empty):
    tokens = tokens.to(device=device, dtype=torch.int32)
    # a mean that is not zero: sums then grow with the number of rows, and a missing row shows
    dout = (torch.randn(tokens.shape[0], D, device=device) + 1).to(dtype)
    dw = backward(dout, tokens, torch.zeros(V, D, device=device), empty)
    # dw is fp32 whatever dout is
    judge(dw, exact=gradient(dout.double(), tokens, V, embedding_ref), peer=gradient(dout.float(), tokens, V, peer_embedding))


def runs(*lengths):
    """Tokens 1, 3, 5 ... in runs of these lengths once sorted, in no order."""
    return torch.repeat_interleave(torch.arange(1, 2 * len(lengths), 2), torch.tensor(lengths))[torch.randperm(sum(lengths))]


RUNS = {
    "one row": runs(1),
    "one run": runs(CHUNK + 3),
    "runs that end where chunks do": runs(CHUNK, CHUNK, 2 * CHUNK),
    "runs one past the end of chunks": runs(CHUNK + 1, CHUNK, CHUNK, 5),
    "a run over many chunks between short ones": runs(1, 7, 3 * CHUNK + 1, 2, 1),
    "heads in every chunk": runs(*[CHUNK - 1] * 6),
    "all different": runs(*[1] * (CHUNK + 5)),
}


@pytest.mark.parametrize(("N", "D", "V"), [(1, 64, 1), (5, 128, 257), (33, 576, 300), (3, 5120, 7)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_copied(N, D, V, dtype, device, empty):
    w = torch.randn(V, D, device=device).to(dtype)
    tokens = torch.randint(V, (N,), dtype=torch.int32, device=device)
    out = empty(N, D, dtype=dtype)
    embedding(tokens, w.data_ptr(), out=out)
    assert torch.equal(out, peer_embedding(tokens, w))


@pytest.mark.parametrize("tokens", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_as_exact_as_torch(tokens, dtype, device, empty):
    check_backward(tokens, 64, int(tokens.max()) + 2, dtype, device, empty)


@pytest.mark.parametrize("num_heads", [HEADS_TILE_CHUNKS - 1, HEADS_TILE_CHUNKS, HEADS_TILE_CHUNKS + 1])
def test_heads_of_more_than_one_tile_are_all_added(num_heads, device, empty):
    check_backward(runs(3, (num_heads + 1) * CHUNK - 3, 2), 16, 6, torch.float32, device, empty)


@pytest.mark.parametrize("D", [192, 576, 640])
def test_widths_that_are_no_power_of_two_are_right(D, device, empty):
    check_backward(runs(2, CHUNK + 2, 1), D, 8, torch.float32, device, empty)


def test_rows_of_absent_tokens_do_not_change_and_others_are_added_to(device, empty):
    tokens = runs(CHUNK + 1, 2).to(device=device, dtype=torch.int32)
    before = torch.randn(5, 64, device=device)
    # what is not touched may even be NaN
    before[0] = float("nan")
    dout = torch.randn(tokens.shape[0], 64, device=device)
    after = backward(dout, tokens, before.clone(), empty)
    assert torch.equal(after[[0, 2, 4]].view(torch.int32), before[[0, 2, 4]].view(torch.int32))
    exact = before.double() + gradient(dout.double(), tokens, 5, embedding_ref)
    peer = before + gradient(dout, tokens, 5, peer_embedding)
    judge(after[[1, 3]], exact=exact[[1, 3]], peer=peer[[1, 3]])


def test_the_same_input_gives_the_same_bits(device, empty):
    tokens = torch.randint(9, (5 * CHUNK + 3,), dtype=torch.int32, device=device)
    dout = torch.randn(tokens.shape[0], 64, device=device)
    first = backward(dout, tokens, torch.zeros(9, 64, device=device), empty)
    assert torch.equal(backward(dout, tokens, torch.zeros(9, 64, device=device), empty), first)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 127, 4099])
@pytest.mark.parametrize("D", [576, 4096, 5120])
def test_bf16_is_right_at_real_sizes(N, D, device, empty):
    V = 152064
    w = torch.randn(V, D, device=device, dtype=torch.bfloat16)
    # 15 % of the rows are one token, the others are spread over the vocabulary
    tokens = torch.randint(V, (N,), dtype=torch.int32, device=device)
    tokens[torch.rand(N, device=device) < 0.15] = 220
    out = empty(N, D, dtype=torch.bfloat16)
    embedding(tokens, w.data_ptr(), out=out)
    assert torch.equal(out, peer_embedding(tokens, w))
    del w
    check_backward(tokens, D, V, torch.bfloat16, device, empty)


@pytest.mark.gpu
def test_a_token_in_half_of_32k_rows_is_as_exact_as_torch(device, empty):
    tokens = torch.randint(257, (32768,), dtype=torch.int32, device=device)
    tokens[torch.rand(32768, device=device) < 0.5] = 32
    check_backward(tokens, 5120, 257, torch.bfloat16, device, empty)
