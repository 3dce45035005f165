"""Markers and devices: `gpu` tests are skipped, visibly, where there is none; kernels run in the interpreter there."""
import os

# as train.py sets it, before torch is imported: threads that spin for each other take ten times as long on a busy machine
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import pytest  # noqa: E402
import torch  # noqa: E402

GPU = torch.cuda.is_available()
if not GPU:
    # has to be there before the first `triton.jit` is seen
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: the GPU, or CPU tensors through Triton's interpreter."""
    return "cuda" if GPU else "cpu"


@pytest.fixture
def empty(device):
    """`empty(*shape, dtype=...)`: memory filled with NaN, so that what a kernel does not write is seen."""
    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return make
