"""A checksum over named weights that does not depend on the order in which they come. Tensor code only."""

import hashlib

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
MASK = (1 << 64) - 1

# Words of a tensor are summed with odd factors that depend on their place, modulo 2**64: any change of a
# single word, and nearly any other, changes the sum. Integer sums are exact in any order, hence equal on
# every device, and run at memory speed, where a cryptographic hash of a large model would take minutes.
PLACE_FACTOR = 0x9E3779B97F4A7C16
WORD_OFFSET = 0x2545F491

WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightChecksum:
    """Collects tensors in any order; `hexdigest` depends on their names, dtypes, shapes and bits."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        shape = ",".join(map(str, tensor.shape))
        self._lines.append(f"{name} {tensor.dtype} {shape} {tensor_sum(tensor):016x}")

    def hexdigest(self) -> str:
        return hashlib.sha256("\n".join(sorted(self._lines)).encode()).hexdigest()


def tensor_sum(tensor: Tensor) -> int:
    """64-bit sum of the tensor's words, each with a factor of its place."""
    words = tensor.detach().contiguous().flatten().view(WORD_DTYPES[tensor.element_size()])
    total = 0
    for start in range(0, words.numel(), CHUNK_ELEMENTS):
        chunk = words[start : start + CHUNK_ELEMENTS].to(torch.int64) + WORD_OFFSET
        places = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=chunk.device)
        factors = places * _signed(PLACE_FACTOR) + 1
        total += int((chunk * factors).sum().item())
    return total & MASK


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
