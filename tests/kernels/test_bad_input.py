"""Bad input: what a kernel does not take is refused before the launch, by the tensor's name; what it takes it takes at any address."""
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from kernels.adamw import adamw
from kernels.attention import attention, attention_backward
from kernels.cross_entropy import linear_cross_entropy
from kernels.embedding import embedding, embedding_backward, embedding_partials_shape
from kernels.gemm import (
    bias_grad_partials_shape,
    linear,
    linear_bias_grad,
    linear_dgrad,
    linear_dgrad_swiglu,
    linear_swiglu,
    linear_wgrad,
)
from kernels.norm2 import norm2, norm2_partials_shape
from kernels.rmsnorm import MAX_D, rmsnorm, rmsnorm_backward, rmsnorm_partials_shape
from kernels.rope import rope, rope_backward, rope_partials_shape
from kernels.swiglu import swiglu
from runtime.host_adamw import adamw_step

# may have more rows than they need
ANY_ROWS = ("partials", "logits", "cos")
N, D, V, F, H, K, Dh = 3, 32, 40, 48, 2, 1, 16
QKV = (H + 2 * K) * Dh
HEADS = {"H": H, "K": K, "Dh": Dh}


class Call(NamedTuple):
    """A call that is right. Tensors by the names of their arguments; `addresses`: tensors given as `name`_addr."""
    op: Callable
    tensors: dict[str, torch.Tensor]
    addresses: dict[str, torch.Tensor] = {}
    rest: dict = {}
    # tensors that others are measured by, so that another one is named when their shape or dtype is not theirs
    measures: tuple[str, ...] = ()
    # tensors that come through descriptors, at multiples of 16 bytes
    aligned: tuple[str, ...] = ()
    # tensors whose rows may be further apart than their columns
    strided: tuple[str, ...] = ()
    def __call__(self, **changes):
        """Runs it with these arguments instead."""
        arguments = self.tensors | {f"{name}_addr": t.data_ptr() for name, t in self.addresses.items()} | self.rest
        self.op(**arguments | changes)


def calls(device: str) -> dict[str, Call]:
    """One for each public operation."""
    def f(*shape, dtype=torch.float32):
        return torch.rand(shape, device=device).to(dtype)

    def i(*shape, upto=1):
        return torch.randint(upto, shape, device=device, dtype=torch.int32)

    whole = torch.zeros(N, dtype=torch.int32, device=device)
    documents = {"doc_start": whole, "doc_end": whole + N}
    tables = {"cos": f(9, Dh // 2), "sin": f(9, Dh // 2), "positions": i(N, upto=9)}
    norms, dnorms = {"q_norm": f(Dh), "k_norm": f(Dh)}, {"dq_norm": f(Dh), "dk_norm": f(Dh)}
    state = {"m": f(V), "v": f(V), "g": f(V), "factor": f(1)}
    step = {"step": adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 1)}
    products = {"measures": ("x", "out"), "aligned": ("x", "dy", "out", "residual", "gate_up", "d_gate_up", "act"),
                "strided": ("x", "dy", "out", "residual", "gate_up", "d_gate_up", "act")}
    return {
        "linear": Call(linear, {"x": f(N, D), "out": f(N, V), "residual": f(N, V)}, {"w": f(V, D), "bias": f(V)}, **products),
        "linear_dgrad": Call(linear_dgrad, {"dy": f(N, V), "out": f(N, D)}, {"w": f(V, D)}, **products | {"measures": ("dy", "out")}),
        "linear_wgrad": Call(linear_wgrad, {"dy": f(N, V), "x": f(N, D)}, {"dw": f(V, D)}, {"accumulate": True},
                             **products | {"measures": ("dy", "x")}),
        "linear_swiglu": Call(linear_swiglu, {"x": f(N, D), "gate_up": f(N, 2 * F), "act": f(N, F)}, {"w": f(2 * F, D)},
                              **products | {"measures": ("x", "act"), "strided": ("x",)}),
        "linear_dgrad_swiglu": Call(linear_dgrad_swiglu, {"dy": f(N, D), "gate_up": f(N, 2 * F), "d_gate_up": f(N, 2 * F), "act": f(N, F)},
                                    {"w": f(D, F)}, **products | {"measures": ("dy", "act")}),
        "linear_bias_grad": Call(linear_bias_grad, {"dy": f(N, V), "partials": f(*bias_grad_partials_shape(V))}, {"db": f(V)},
                                 {"accumulate": True}, **products | {"measures": ("dy",)}),
        "attention": Call(attention, {"qkv": f(N, QKV), **documents, "out": f(N, H * Dh), "lse": f(H, N)}, {}, HEADS | {"scale": 0.25},
                          measures=("qkv",), aligned=("qkv", "doc_start", "doc_end", "out", "lse")),
        "attention_backward": Call(attention_backward, {"qkv": f(N, QKV), "out": f(N, H * Dh), "lse": f(H, N), "dout": f(N, H * Dh),
                                                        **documents, "delta": f(H, N), "dqkv": f(N, QKV)}, {}, HEADS | {"scale": 0.25},
                                   measures=("qkv",),
                                   aligned=("qkv", "out", "lse", "dout", "doc_start", "doc_end", "delta", "dqkv")),
        "linear_cross_entropy": Call(linear_cross_entropy, {"x": f(N, D), "labels": i(N, upto=V), "logits": f(2, V), "losses": f(N),
                                                            "dx": f(N, D)}, {"w": f(V, D), "dw": f(V, D)}, {"scale": 1.0, "V": V},
                                     measures=("x",), aligned=("x", "logits", "dx"), strided=("logits",)),
        "rmsnorm": Call(rmsnorm, {"x": f(N, D), "out": f(N, D), "rstd": f(N)}, {"w": f(D)}, {"eps": 1e-6}, measures=("x",)),
        "rmsnorm_backward": Call(rmsnorm_backward, {"dy": f(N, D), "x": f(N, D), "rstd": f(N), "residual": f(N, D), "dx": f(N, D),
                                                    "partials": f(*rmsnorm_partials_shape(D))}, {"w": f(D), "dw": f(D)},
                                 {"accumulate": True}, measures=("x",)),
        "rope": Call(rope, {"qkv": f(N, QKV), **tables, "out": f(N, QKV)}, norms, HEADS | {"eps": 1e-6}, measures=("qkv",)),
        "rope_backward": Call(rope_backward, {"dqkv": f(N, QKV), "qkv": f(N, QKV), **tables, "partials": f(*rope_partials_shape(Dh))},
                              norms | dnorms, HEADS | {"eps": 1e-6}, measures=("dqkv",)),
        "rope_backward without norms": Call(rope_backward, {"dqkv": f(N, QKV), **tables}, {}, HEADS | {"qkv": None}, measures=("dqkv",)),
        "swiglu": Call(swiglu, {"gate_up": f(N, 2 * F), "out": f(N, F)}, measures=("out",)),
        "embedding": Call(embedding, {"tokens": i(N, upto=V), "out": f(N, D)}, {"w": f(V, D)}, measures=("out",)),
        "embedding_backward": Call(embedding_backward, {"dout": f(N, D), "tokens": whole.clone(),
                                                        "order": torch.arange(N, dtype=torch.int32, device=device),
                                                        "partials": f(*embedding_partials_shape(N, D))}, {"dw": f(V, D)},
                                   measures=("dout",)),
        "norm2": Call(norm2, {"grad": f(V), "out": f(V), "partials": f(*norm2_partials_shape()),
                              "result": f(2, dtype=torch.float64)}, measures=("grad",)),
        "adamw": Call(adamw, {"hi": f(V), **state}, {}, {"lo": None, **step}, measures=("hi",)),
        "adamw, split": Call(adamw, {"hi": f(V, dtype=torch.bfloat16), "lo": i(V, upto=99).short(), **state}, {}, step, measures=("hi",)),
    }


def parameters(which: Callable[[Call], list[str]]):
    """(operation, name) for each tensor that `which` picks of each call."""
    return [pytest.param(op, name, id=f"{op}-{name}") for op, call in calls("cpu").items() for name in which(call)]


def shifted(t: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same numbers, that many elements behind a multiple of 16 bytes."""
    return torch.cat([t.new_zeros(elements), t.flatten()])[elements:].view(t.shape)


def refused(name: str):
    return pytest.raises(ValueError, match=f"^{name}:")


@pytest.mark.parametrize("op", calls("cpu"))
def test_the_calls_of_this_file_are_right(op, device):
    calls(device)[op]()


@pytest.mark.parametrize(("op", "name"), parameters(lambda call: [n for n in call.tensors if n not in call.measures]))
def test_a_wrong_shape_is_refused_by_name(op, name, device):
    call = calls(device)[op]
    t = call.tensors[name]
    with refused(name):
        call(**{name: t[:-1] if t.ndim == 1 else t[:, :-8]})


@pytest.mark.parametrize(("op", "name"), parameters(lambda call: [n for n in call.tensors if n not in (*call.measures[:1], *ANY_ROWS)]))
def test_more_rows_are_refused_by_name(op, name, device):
    call = calls(device)[op]
    with refused(name):
        call(**{name: torch.cat([call.tensors[name]] * 2)})


@pytest.mark.parametrize(("op", "name"), parameters(lambda call: [n for n in call.tensors if n not in call.measures[:1]]))
def test_a_wrong_dtype_is_refused_by_name(op, name, device):
    call = calls(device)[op]
    t = call.tensors[name]
    with refused(name):
        call(**{name: t.half() if t.dtype.is_floating_point else t.long()})


@pytest.mark.parametrize(("op", "name"), parameters(lambda call: list(call.measures[:1])))
def test_what_others_are_measured_by_is_refused_by_name_in_fp64_and_without_columns(op, name, device):
    call = calls(device)[op]
    t = call.tensors[name]
    # embedding copies whatever its rows are
    if op != "embedding":
        with refused(name):
            call(**{name: t.double()})
    if t.ndim == 2:
        with refused(name):
            call(**{name: t[:, 0].clone()})


def test_adamw_refuses_a_master_that_is_not_of_its_kind(device):
    for op in ("adamw", "adamw, split"):
        call = calls(device)[op]
        with refused("hi"):
            call(hi=call.tensors["hi"].to(torch.bfloat16 if op == "adamw" else torch.float32))


@pytest.mark.parametrize(("op", "name"), parameters(lambda call: [n for n, t in call.tensors.items() if t.numel() > 1]))
def test_a_stride_between_elements_is_refused_by_name(op, name, device):
    call = calls(device)[op]
    t = call.tensors[name]
    with refused(name):
        call(**{name: torch.stack([t, t], -1)[..., 0]})


@pytest.mark.parametrize(("op", "name"), parameters(lambda call: [n for n, t in call.tensors.items() if t.ndim == 2 and n != "partials"]))
def test_rows_apart_are_refused_by_name_where_the_kernel_takes_none(op, name, device):
    call = calls(device)[op]
    t = call.tensors[name]
    if name not in call.strided:
        with refused(name):
            call(**{name: torch.cat([t, t], 1)[:, : t.shape[1]]})
    else:
        call(**{name: torch.cat([t, t], 1)[:, : t.shape[1]]})
        # not a multiple of 16 bytes apart
        with refused(name):
            call(**{name: torch.cat([t, t[:, :1]], 1)[:, : t.shape[1]]})


@pytest.mark.parametrize(("op", "name"), parameters(lambda call: list(call.addresses)))
def test_an_address_that_is_no_multiple_of_16_bytes_is_refused_by_name(op, name, device):
    call = calls(device)[op]
    with refused(name):
        call(**{f"{name}_addr": call.addresses[name].data_ptr() + 4})


@pytest.mark.parametrize(("op", "name"), parameters(lambda call: list(call.tensors)))
def test_a_tensor_anywhere_is_refused_by_name_or_right(op, name, device):
    call, expected = calls(device)[op], calls(device)[op]
    misaligned = name in call.aligned or (op, name) == ("norm2", "partials")
    for mine, theirs in ((call.tensors, expected.tensors), (call.addresses, expected.addresses)):
        for each in mine:
            theirs[each].copy_(mine[each])
    call.tensors[name] = shifted(call.tensors[name])
    if misaligned:
        with refused(name):
            call()
        return
    call()
    expected()
    # narrower loads are another order of sums
    for mine, theirs in ((call.tensors, expected.tensors), (call.addresses, expected.addresses)):
        for each in mine.keys() - {"partials"}:
            torch.testing.assert_close(mine[each], theirs[each])


@pytest.mark.parametrize("op", ["rmsnorm", "rmsnorm_backward"])
def test_rows_wider_than_a_program_holds_are_refused_by_name(op, device):
    wide = torch.zeros(N, MAX_D + 16, device=device)
    with pytest.raises(ValueError, match=f"^x: rows of {MAX_D + 16}"):
        calls(device)[op](x=wide)


@pytest.mark.parametrize("op", ["rope", "rope_backward", "rope_backward without norms", "attention", "attention_backward"])
@pytest.mark.parametrize("width", [80, 1, 0])
def test_head_widths_that_kernels_do_not_have_are_refused_by_name(op, width, device):
    with refused("Dh"):
        calls(device)[op](Dh=width)


@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_heads_that_do_not_share_and_a_scale_below_zero_are_refused_by_name(op, device):
    for name, change in (("H", {"H": 3, "K": 2}), ("H", {"K": 0}), ("scale", {"scale": 0.0})):
        with refused(name):
            calls(device)[op](**change)


def test_rope_refuses_half_its_norms_and_the_buffer_that_its_backward_reads(device):
    call = calls(device)["rope"]
    with refused("q_norm k_norm"):
        call(k_norm_addr=0)
    with pytest.raises(ValueError, match="^out: is qkv"):
        call(out=call.tensors["qkv"])
    with refused("qkv"):
        calls(device)["rope_backward"](qkv=None)


def test_swiglu_refuses_a_width_that_is_no_multiple_of_16(device):
    with pytest.raises(ValueError, match="^out: 24 columns"):
        calls(device)["swiglu"](gate_up=torch.zeros(N, 48, device=device), out=torch.zeros(N, 24, device=device))


def test_the_loss_refuses_a_gradient_without_a_place_for_the_matrixs(device):
    with refused("dw"):
        calls(device)["linear_cross_entropy"](dw_addr=0)


@pytest.mark.parametrize(("op", "narrow", "name"), [("linear", "x", "w"), ("linear_dgrad", "out", "w"), ("linear_wgrad", "x", "dw")])
def test_rows_of_a_matrix_that_are_no_multiple_of_16_bytes_are_refused_by_name(op, narrow, name, device):
    with pytest.raises(ValueError, match=f"^{name}: rows of 33"):
        calls(device)[op](**{narrow: torch.zeros(N, 36, device=device)[:, :33]})
