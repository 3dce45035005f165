"""The bar of every numerical test: at most twice as far from fp64 as plain torch is in the same dtype."""
import torch


def judge(got: torch.Tensor, *, exact: torch.Tensor, peer: torch.Tensor) -> None:
    """Fails unless `got` is at most twice as far from `exact` (fp64) as `peer` (torch, same dtype) is, plus one ulp
    of the largest value."""
    got, exact, peer = got.cpu(), exact.cpu(), peer.cpu()
    assert got.shape == exact.shape == peer.shape, f"shapes {got.shape}, {exact.shape}, {peer.shape}"
    assert got.isfinite().all(), "NaN or inf: a part of the output was never written"
    ulp = torch.finfo(got.dtype).eps * exact.abs().max()
    err, bar = (got.double() - exact).abs().max(), 2 * (peer.double() - exact).abs().max() + ulp
    assert err <= bar, f"error {err:.3g}, allowed {bar:.3g}"
