"""Hooks on sglang.kernels.ops.sampling.murmur_hash."""

from typing import Any


def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
    """Instead of `murmur_hash32`: the same hash in torch integers."""
    from sglang_patches.cpu import murmur

    return murmur.murmur_hash32(seed, positions, col_indices)
