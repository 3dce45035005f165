"""The operations of a block in plain torch: the same names and arguments as the kernels (model/fused.py), with views
where those take addresses. It runs anywhere, in any dtype; fp64 in, fp64 out. The oracle, and the CPU's default.

Statistics (norms, softmax, loss) are fp32 at least. A machine without Triton trains on this file.
"""
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from model.layout import Weights

# query rows that attend together: bounds the score matrix at [H, rows, keys]
_QUERY_ROWS = 128


def operand(w: Weights, name: str) -> torch.Tensor | None:
    """What these operations take for a weight: its view, or None where the layer has none."""
    return w.view(name)


def partials_elements(c, N: int) -> int:
    """fp32 elements of scratch for ordered reductions: plain torch needs none, and an empty buffer has no address."""
    return 1


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _put(target: torch.Tensor, value: torch.Tensor, accumulate: bool) -> None:
    target.add_(value) if accumulate else target.copy_(value)


# linear

def linear(x, w, *, out, bias_addr=None, residual=None):
    """out [M, N] = x W^T (+ bias) (+ residual)."""
    if bias_addr is None and residual is None:
        torch.mm(x, w.T, out=out)
        return
    y = _wide(x @ w.T)
    if bias_addr is not None:
        y = y + bias_addr
    out.copy_(y if residual is None else y + residual)


def linear_swiglu(x, w, *, gate_up, act):
    """gate_up [M, 2F] = x W^T, act [M, F] = silu(gate) * up."""
    linear(x, w, out=gate_up)
    gate, up = _wide(gate_up).chunk(2, -1)
    act.copy_(F.silu(gate) * up)


def linear_dgrad(dy, w, *, out):
    """out [M, K] = dy W."""
    torch.mm(dy, w, out=out)


def linear_wgrad(dy, x, dw, *, accumulate):
    """dW [N, K] fp32 (= or +=) dy^T x."""
    _put(dw, _wide(dy).T @ _wide(x), accumulate)


def linear_bias_grad(dy, db, *, partials, accumulate):
    """db [N] fp32 (= or +=) column sums of dy."""
    _put(db, _wide(dy).sum(0), accumulate)


def linear_dgrad_swiglu(dy, w, gate_up, *, d_gate_up, act):
    """d_act = dy W_down, taken back through silu(gate) * up: writes d_gate_up (may be gate_up) and act."""
    d_act = _wide(dy @ w)
    gate, up = _wide(gate_up).chunk(2, -1)
    s = torch.sigmoid(gate)
    silu = gate * s
    d_up = d_act * silu
    d_gate = d_act.mul_(up).mul_(s.mul_(1 - silu).add_(silu))
    torch.mul(silu, up, out=act) if act.dtype == silu.dtype else act.copy_(silu * up)
    target = d_gate_up.chunk(2, -1)
    target[0].copy_(d_gate)
    target[1].copy_(d_up)


# RMSNorm

def rmsnorm(x, w, eps, *, out, rstd):
    """out = x rstd w, rstd = 1 / sqrt(mean(x^2) + eps)."""
    wide = _wide(x)
    rstd.copy_(torch.rsqrt(wide.square().mean(-1) + eps))
    out.copy_(wide * rstd[:, None] * w)


def _norm_backward(dy, x, w, rstd):
    """Gradients with respect to x and w of y = x rstd w over the last dimension."""
    x_hat = x * rstd[..., None]
    dw = (dy * x_hat).flatten(0, -2).sum(0)
    wdy = dy * w
    return rstd[..., None] * (wdy - x_hat * (wdy * x_hat).mean(-1, keepdim=True)), dw


def rmsnorm_backward(dy, x, w, rstd, residual, *, dx, dw_addr, partials, accumulate):
    """dx = residual (or 0) + gradient through the norm; dw [D] fp32 (= or +=)."""
    grad, dw = _norm_backward(_wide(dy), _wide(x), _wide(w), rstd)
    dx.copy_(grad if residual is None else grad + residual)
    _put(dw_addr, dw, accumulate)


# RoPE

def _heads(qkv, H, K, Dh):
    """q [N, H, Dh], k [N, K, Dh], v [N, K, Dh] as views of the fused projection."""
    return qkv.view(qkv.shape[0], H + 2 * K, Dh).split([H, K, K], 1)


def _rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rope(qkv, cos, sin, positions, H, K, Dh, *, out, q_norm_addr=None, k_norm_addr=None, eps=0.0):
    """Rotates q and k by their positions, after their norms if they have any; v is copied."""
    cos, sin = (t[positions.long()][:, None] for t in (cos, sin))
    q, k, v = _heads(qkv, H, K, Dh)
    for x, target, w in zip((q, k), _heads(out, H, K, Dh), (q_norm_addr, k_norm_addr), strict=False):
        wide = _wide(x)
        if w is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * w
        target.copy_(_rotate(wide, cos, sin))
    if out is not qkv:
        _heads(out, H, K, Dh)[2].copy_(v)


def rope_backward(dqkv, qkv, cos, sin, positions, H, K, Dh, *, q_norm_addr=None, k_norm_addr=None, eps=0.0,
                  dq_norm_addr=None, dk_norm_addr=None, partials=None, accumulate=False):
    """In place: the gradient of the projection from the gradient of what attention read."""
    cos, sin = (t[positions.long()][:, None] for t in (cos, sin))
    pairs = zip(_heads(dqkv, H, K, Dh)[:2], _heads(qkv, H, K, Dh)[:2], (q_norm_addr, k_norm_addr),
                (dq_norm_addr, dk_norm_addr), strict=True)
    for grad, x, w, dw in pairs:
        g = _rotate(_wide(grad), cos, -sin)
        if w is not None:
            x = _wide(x)
            g, dw_now = _norm_backward(g, x, _wide(w), torch.rsqrt(x.square().mean(-1) + eps))
            _put(dw, dw_now, accumulate)
        grad.copy_(g)


# attention

def _pieces(doc_start, doc_end):
    """(first query, one past the last, first key, one document): pieces of at most _QUERY_ROWS queries. Keys end where
    the queries do, and begin where the first query's document does."""
    starts, ends = doc_start.tolist(), doc_end.tolist()
    a = 0
    while a < len(starts):
        b = min(a + _QUERY_ROWS, len(starts))
        # a piece that ends with a document has no keys of another one
        if ends[a] <= b and ends[b - 1] > b:
            b = starts[b - 1]
        yield a, b, starts[a], ends[a] >= b
        a = b


def _by_head(x, K):
    """[rows, heads, Dh] as [K, heads / K * rows, Dh]: query heads that share a kv head, one after the other."""
    rows, heads, Dh = x.shape
    return x.reshape(rows, K, heads // K, Dh).permute(1, 2, 0, 3).reshape(K, -1, Dh)


def _by_row(x, rows):
    """The inverse of _by_head: [rows, heads, Dh]."""
    K, _, Dh = x.shape
    return x.view(K, -1, rows, Dh).permute(2, 0, 1, 3).reshape(rows, -1, Dh)


def _scores(q, k, piece, doc_start, scale):
    """scale q k^T [K, G * queries, keys], -inf where a query does not see a key."""
    a, b, first, one_document = piece
    s = torch.bmm(q * scale, k.permute(1, 2, 0))
    seen = s.view(len(s), -1, b - a, b - first)
    rows = torch.arange(a, b, device=q.device)[:, None]
    # within one document only the last keys, the queries' own, can be in a query's future
    begin = a if one_document else first
    keys = torch.arange(begin, b, device=q.device)
    hidden = keys > rows if one_document else (keys > rows) | (keys < doc_start[a:b, None])
    seen[..., begin - first:].masked_fill_(hidden, float("-inf"))
    return s


def attention(qkv, doc_start, doc_end, H, K, Dh, scale, *, out, lse):
    """Causal attention within documents; lse [H, N] fp32 is the natural log of the sum of exponentials."""
    q, k, v = _heads(_wide(qkv), H, K, Dh)
    for piece in _pieces(doc_start, doc_end):
        a, b, first, _ = piece
        s = _scores(_by_head(q[a:b], K), k[first:b], piece, doc_start, scale)
        top = s.amax(-1, keepdim=True)
        total = s.sub_(top).exp_().sum(-1, keepdim=True)
        out[a:b] = _by_row(torch.bmm(s, v[first:b].transpose(0, 1)).div_(total), b - a).reshape(b - a, -1)
        lse[:, a:b] = total.log_().add_(top).view(H, b - a)


def attention_backward(qkv, out, lse, dout, doc_start, doc_end, H, K, Dh, scale, *, delta, dqkv):
    """dqkv from dout; delta [H, N] is scratch for the row sums of out * dout."""
    N = qkv.shape[0]
    q, k, v = _heads(_wide(qkv), H, K, Dh)
    dout = _wide(dout).view(N, H, Dh)
    delta.copy_((dout * out.view(N, H, Dh)).sum(-1).T)
    grads = torch.zeros_like(_wide(qkv))
    dq, dk, dv = _heads(grads, H, K, Dh)
    for piece in _pieces(doc_start, doc_end):
        a, b, first, _ = piece
        q_now, do = _by_head(q[a:b], K), _by_head(dout[a:b], K)
        p = _scores(q_now, k[first:b], piece, doc_start, scale).sub_(lse[:, a:b].reshape(K, -1, 1)).exp_()
        dv[first:b] += torch.bmm(p.transpose(1, 2), do).transpose(0, 1)
        ds = torch.bmm(do, v[first:b].permute(1, 2, 0)).sub_(delta[:, a:b].reshape(K, -1, 1)).mul_(p).mul_(scale)
        dq[a:b] = _by_row(torch.bmm(ds, k[first:b].transpose(0, 1)), b - a)
        dk[first:b] += torch.bmm(ds.transpose(1, 2), q_now).transpose(0, 1)
    dqkv.copy_(grads)


# embedding and loss

def embedding(tokens, w, *, out):
    """out [N, D] = rows of w."""
    torch.index_select(w, 0, tokens, out=out)


def embedding_backward(dout, tokens, order, dw, *, partials):
    """dW [V, D] fp32 += the rows of each token, in row order."""
    dw.index_add_(0, tokens[order.long()], _wide(dout)[order.long()])


def linear_cross_entropy(x, w, labels, scale, *, V, logits, losses, dx=None, dw_addr=None, accumulate=False):
    """Loss a row (0 where masked) and, with dx, gradients of scale * sum(losses); logits live a chunk at a time."""
    chunk = logits.shape[0]
    for i in range(0, x.shape[0], chunk):
        rows = slice(i, i + chunk)
        label = labels[rows].long()
        masked = label < 0
        target = label.clamp_min(0)[:, None]
        scores = logits[: label.shape[0], :V]
        torch.mm(x[rows], w.T, out=scores)
        scores = _wide(scores)
        lse = torch.logsumexp(scores, -1)
        losses[rows] = (lse - scores.gather(1, target)[:, 0]).masked_fill_(masked, 0)
        if dx is None:
            continue
        # the chunk's logits become its gradient in place: no second [chunk, V] is alive
        grad = scores.sub_(lse[:, None]).exp_()
        grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0)).mul_(scale)
        grad.masked_fill_(masked[:, None], 0)
        torch.mm(grad.to(x.dtype), w, out=dx[rows])
        linear_wgrad(grad, x[rows], dw_addr, accumulate=accumulate or i > 0)


# gradient norm

def norm2(grad, *, out, partials, result):
    """out = grad, rounded; result fp64 [2] = sum of grad's squares, number of elements of out that are not finite."""
    out.copy_(grad)
    result[0] = grad.double().square_().sum()
    # rounding can make inf of what is finite in fp32, and out is what the update reads
    result[1] = out.numel() - out.isfinite().sum()


def adamw(hi, lo, m, v, g, factor, step: Sequence[float]):
    """AdamW in place on a master stored as hi and lo, or as hi alone; nothing where factor [1] is NaN. See kernels/adamw.py."""
    if factor.isnan():
        return
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, rate, rbc2 = step
    bits = None if lo is None else (hi.view(torch.int16).to(torch.int32) << 16) + lo
    w = hi if lo is None else bits.view(torch.float32)
    x = _wide(g) * factor
    m.mul_(beta1).add_(one_minus_beta1 * x)
    v.mul_(beta2).add_(one_minus_beta2 * (x * x))
    # torch's fp32 root on a CPU is not the nearest number; fp64's, rounded, is
    root = v.double().sqrt().to(v.dtype)
    w.mul_(decay).sub_(rate * (m / (root * rbc2 + eps)))
    if lo is not None:
        hi.view(torch.int16).copy_((bits + 0x8000) >> 16)
        lo.copy_(bits)
