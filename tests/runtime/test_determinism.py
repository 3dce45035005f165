"""The same seed gives the same bits."""
import pytest
import torch

from tests.models import VARIANTS
from tests.runtime.make import batches, losses, masters, same, train, trainer


@pytest.fixture
def torch_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def run(precision, seed=0):
    c = VARIANTS["both"]
    with trainer(c, T=48, precision=precision, seed=seed) as made:
        results = train(made, batches(c, 3, T=48))
        return losses(results), [r.grad_norm for r in results], masters(made)


@pytest.mark.parametrize("torch_threads", [1, 4], indirect=True)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_NUM6_same_run_twice(precision, torch_threads):
    first, second = run(precision), run(precision)
    assert first[:2] == second[:2] and same(first[2], second[2])


def test_NUM6_another_seed_is_another_run():
    assert run("fp32")[0] != run("fp32", seed=1)[0]
