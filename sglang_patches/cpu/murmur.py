"""32-bit MurmurHash3 of (seed, position, column) in torch integers, bit for bit as SGLang's kernels."""

import torch

_MASK = 0xFFFFFFFF
_NUM_BYTES_HASHED = 16


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash each (row, column) pair.

    seed: [num_rows] 64-bit integers; positions: [num_rows]; col_indices: [num_cols].
    Returns uint32 of shape [num_rows, num_cols].
    """
    # int64 holds every 32-bit product up to a wrap that keeps the low 32 bits, which is all that is used.
    seed = seed.to(torch.int64)
    h = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        h = _mix(h, block)
    h = _mix(h.unsqueeze(1), (col_indices.to(torch.int64) & _MASK).unsqueeze(0))
    return _finish(h ^ _NUM_BYTES_HASHED).to(torch.uint32)


def _rotate_left(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    return ((x << num_bits) | (x >> (32 - num_bits))) & _MASK


def _mix(h: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (block * 0xCC9E2D51) & _MASK
    block = (_rotate_left(block, 15) * 0x1B873593) & _MASK
    return (_rotate_left(h ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _finish(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)
