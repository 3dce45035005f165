"""Matrices whose offsets pass a border (2^31 on a GPU, little in the interpreter), and what stands around it.

What a kernel writes far from the start has to equal what it writes when it is given the rows around the border alone.
"""
import math

import torch

from kernels.launch import INTERPRET

# no kernel's tile has more rows: rows taken out by whole tiles fall on the same places of tiles again
TILE = 64 if INTERPRET else 128
CANARY = 0xA5
# as far as an offset in elements of 2 bytes, wrapped around, goes in front of the start
MOST_GUARD_BYTES = 1 << 32


def rows_past(border: int, cols: int) -> int:
    """Rows of `cols` elements, whole tiles, so that element `border` is not in the last tile."""
    return (border // cols // TILE + 2) * TILE


def rows_around(N: int, *border_rows: int) -> torch.Tensor:
    """Numbers of all rows in the tiles of these rows, in the tile before each, and in the last tile of N rows."""
    tiles = {t for row in border_rows for t in (row // TILE - 1, row // TILE) if t >= 0} | {N // TILE - 1}
    return (torch.tensor(sorted(tiles))[:, None] * TILE + torch.arange(TILE)).flatten()


def borders(border: int, cols: int, dtype: torch.dtype) -> tuple[int, int]:
    """The rows of `cols` elements in which the offset in bytes and that in elements is `border`."""
    return border // dtype.itemsize // cols, border // cols


def normal(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def zero_but(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Zeros [of x's shape] with x in these rows alone: their contribution to a sum over rows is the only one."""
    out = torch.zeros_like(x)
    out[rows] = x[rows]
    return out


class Guarded:
    """`guarded(*shape, dtype=...)`: memory full of NaN between canaries; `check()`: all written, and nothing beside it."""

    def __init__(self, device: str):
        self.device, self.buffers = device, []

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        guard = min(-(-size // 256) * 256, MOST_GUARD_BYTES)
        whole = torch.empty(-(-(guard + size + 4096) // 8) * 8, dtype=torch.uint8, device=self.device).fill_(CANARY)
        x = whole[guard: guard + size].view(dtype).view(shape)
        if dtype.is_floating_point:
            x.fill_(float("nan"))
        self.buffers.append((whole, guard, x))
        return x

    def check(self) -> None:
        canaries = int.from_bytes(bytes([CANARY] * 8), "little", signed=True)
        for whole, guard, x in self.buffers:
            assert (whole[:guard].view(torch.int64) == canaries).all(), "written in front of the start"
            assert (whole[guard + x.numel() * x.element_size():] == CANARY).all(), "written behind the end"
            assert not x.isnan().any(), "not all is written"
