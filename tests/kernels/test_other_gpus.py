"""Tiles and paths of GPUs that are not here, on the one that is: right numbers, whatever their speed."""
import pytest
import torch

from kernels import gemm, launch
from kernels.gemm import linear, linear_dgrad, linear_dgrad_swiglu, linear_ref, linear_swiglu, linear_wgrad
from kernels.swiglu import swiglu_ref
from tests.judge import judge
from tests.kernels.aot import H200, TARGETS
from tests.kernels.test_attention import check, random_lengths
from tests.kernels.test_gemm import fp32_product

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(params=[name for name in TARGETS if name != H200], autouse=True)
def other_gpu(request, monkeypatch):
    """Tile tables, descriptors or pointers, stages: as that GPU would have them."""
    monkeypatch.setattr(launch, "gpu", lambda device=0: TARGETS[request.param].gpu)
    gemm.launch_options.cache_clear()
    yield
    gemm.launch_options.cache_clear()


@pytest.mark.parametrize("Dh", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[1000], random_lengths(1500)], ids=["one", "packed"])
def test_attention_is_as_exact_as_torch(lengths, Dh, device, empty):
    check(empty, device, BF16, lengths, 10, 2, Dh)


@pytest.mark.parametrize(("M", "N", "K"), [(129, 144, 80), (1500, 1040, 2048)])
def test_products_are_as_exact_as_torch(M, N, K, empty, device):
    x, dy, w = (torch.randn(shape, device=device).to(BF16) for shape in ((M, K), (M, N), (N, K)))
    out, dx, dw = empty(M, N, dtype=BF16), empty(M, K, dtype=BF16), empty(N, K)
    linear(x, w.data_ptr(), out=out)
    linear_dgrad(dy, w.data_ptr(), out=dx)
    linear_wgrad(dy, x, dw.data_ptr(), accumulate=False)
    judge(out, exact=linear_ref(x.double(), w.double()), peer=linear_ref(x, w))
    judge(dx, exact=dy.double() @ w.double(), peer=dy @ w)
    judge(dw, exact=dy.double().T @ x.double(), peer=fp32_product(dy.T, x))


def test_products_with_swiglu_are_as_exact_as_torch(empty, device):
    M, F, D = 1500, 1040, 512
    x, w, down = (torch.randn(shape, device=device).to(BF16) / D**0.5 for shape in ((M, D), (2 * F, D), (D, F)))
    gate_up, act, again = empty(M, 2 * F, dtype=BF16), empty(M, F, dtype=BF16), empty(M, F, dtype=BF16)
    linear_swiglu(x, w.data_ptr(), gate_up=gate_up, act=act)
    judge(gate_up, exact=linear_ref(x.double(), w.double()), peer=linear_ref(x, w))
    judge(act, exact=swiglu_ref(gate_up.double()), peer=swiglu_ref(gate_up))
    exact = gemm.dgrad_swiglu_ref(x.double(), down.double(), gate_up.double())
    peer = gemm.dgrad_swiglu_ref(x, down, gate_up)
    linear_dgrad_swiglu(x, down.data_ptr(), gate_up, d_gate_up=gate_up, act=again)
    judge(gate_up, exact=exact[0], peer=peer[0])
    judge(again, exact=exact[1], peer=peer[1])
