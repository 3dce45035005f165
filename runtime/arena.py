"""One allocation on the device, laid out before training; later nothing is allocated that its table does not list."""
import math

import torch

# what torch's own allocator aligns to, and more than TMA needs
ALIGN_BYTES = 512


class Arena:
    """Hands out consecutive pieces of one buffer and remembers how much each purpose took.

    device "meta" counts only: a plan is made by taking everything from such an arena.
    """

    def __init__(self, device: torch.device | str, num_bytes: int, dtype: torch.dtype):
        """dtype: of tensors that name none."""
        self.device, self.dtype = torch.device(device), dtype
        self.table: dict[str, int] = {}
        self.used_bytes = 0
        self.counting = self.device.type == "meta"
        self._memory = None if self.counting else torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def take(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uninitialized [*shape]; entries of the same purpose add up in the table. MemoryError beyond the plan."""
        dtype = dtype or self.dtype
        size = math.prod(shape) * dtype.itemsize
        begin = self.used_bytes
        self.used_bytes = begin + -(-size // ALIGN_BYTES) * ALIGN_BYTES
        self.table[purpose] = self.table.get(purpose, 0) + self.used_bytes - begin
        if self.counting:
            return torch.empty(shape, dtype=dtype, device="meta")
        if self.used_bytes > self._memory.numel():
            raise MemoryError(f"{purpose}: {self.used_bytes} bytes wanted, the plan laid out {self._memory.numel()}")
        return self._memory[begin:begin + size].view(dtype).view(shape)
