"""The seeded sampler's hash against MurmurHash3 written over bytes, itself checked with published values."""

import struct

import pytest
import torch

from sglang_patches.cpu.murmur import murmur_hash32


def murmur3_32(data: bytes, seed: int) -> int:
    """MurmurHash3 x86 32-bit of a whole number of 4-byte blocks."""
    mask, h = 0xFFFFFFFF, seed

    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> (32 - bits)) & mask

    for (block,) in struct.iter_unpack("<I", data):
        h ^= rotated(block * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
        h = (rotated(h, 13) * 5 + 0xE6546B64) & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 1, 0x514E28B7),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"\x21\x43\x65\x87", 0, 0xF55B516B),
        (b"test", 0, 0xBA6BD213),
    ],
)
def test_the_reference_is_murmur3(data: bytes, seed: int, expected: int) -> None:
    assert murmur3_32(data, seed) == expected


def test_hashes_equal_the_reference() -> None:
    seeds = [0, 1, 7, 2**31 - 1, 2**32 + 5, 2**63 - 1]
    positions = [0, 1, 2, 1000, 2**31 - 1, 77]
    columns = [0, 1, 63, 151_935]
    got = murmur_hash32(
        torch.tensor(seeds).to(torch.uint64),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(columns),
    )
    expected = [
        [murmur3_32(struct.pack("<QII", seed, position, column), 0) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert got.dtype is torch.uint32
    assert got.tolist() == expected
