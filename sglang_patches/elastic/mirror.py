"""A copy of every expert in host memory, from which survivors restore what a lost rank held.

    rank r     writes its home experts (its canonical block) at the start and after every weight update
    rank s     on the same host maps all mirrors at the start, and reads from them after a loss

The memory is anonymous and shared: it has no name in any file system, lives as long as any rank of the host
maps it, also after its writer's death, and nothing is left of it however the server ends.

Invariant: a mirror's header names a weight_version only while the whole block of that version lies in it. So
a rank that dies while it writes leaves a mirror of no version, and never one of two versions.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from flexfloor.errors import FlexfloorError
from sglang_patches.elastic.expert_slots import ExpertLayers

_MAGIC = b"FLEXMIRR"
_HEADER = struct.Struct("<8s32sI256s")
"""Magic, nonce of this mirror, 1 where the block is whole, weight_version in UTF-8."""
_STATE_OFFSET = 8 + 32
_PAGE_BYTES = 4096
_CHECKSUM_BYTES = 4


class MirrorUnusable(FlexfloorError):
    """No mirror holds what is needed, whole and of the right version; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorAddress:
    """How another rank finds a mirror."""

    ep_rank: int
    host: str
    path: str
    """Under which processes of this user on this host can open it while its writer lives."""
    nonce: bytes
    experts: tuple[int, ...]


class _Layout:
    """Where an expert's bytes and checksums lie; the same on all ranks of a model."""

    def __init__(self, experts: ExpertLayers, num_own: int) -> None:
        self.num_own = num_own
        self.tensor_bytes = [[tensor[:1].nbytes for tensor in row] for row in experts.by_layer()]
        num_checksums = num_own * sum(len(row) for row in self.tensor_bytes)
        head = _HEADER.size + num_checksums * _CHECKSUM_BYTES
        self.data_offset = -(-head // _PAGE_BYTES) * _PAGE_BYTES
        self.num_bytes = self.data_offset + num_own * sum(sum(row) for row in self.tensor_bytes)

    def places(self, own: int) -> Iterator[tuple[int, int, int, int]]:
        """(layer, offset of the bytes, their number, offset of the checksum) of an expert's tensors."""
        data, checksum = self.data_offset, _HEADER.size
        for layer, sizes in enumerate(self.tensor_bytes):
            for size in sizes:
                yield layer, data + own * size, size, checksum + own * _CHECKSUM_BYTES
                data += self.num_own * size
                checksum += self.num_own * _CHECKSUM_BYTES


class ExpertMirrors:
    """This rank's own mirror, and those of the ranks on its host. Making it is collective over all ranks.

    Args:
        exchange: every rank's value in rank order; also a barrier.
    """

    def __init__(
        self,
        experts: ExpertLayers,
        ep_rank: int,
        block: Sequence[int],
        exchange: Callable[[object], list[object]],
    ) -> None:
        self._experts = experts
        self._block = tuple(block)
        self._layout = _Layout(experts, len(self._block))
        self._nonce = os.urandom(32)
        descriptor = os.memfd_create("flexfloor_experts", os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, self._layout.num_bytes)
            self._own = mmap.mmap(descriptor, self._layout.num_bytes)
            _HEADER.pack_into(self._own, 0, _MAGIC, self._nonce, 0, b"")
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            own = MirrorAddress(
                ep_rank=ep_rank, host=_host(), path=path, nonce=self._nonce, experts=self._block
            )
            addresses = [row for row in exchange(own) if isinstance(row, MirrorAddress)]
            self._mirrors = {row.ep_rank: self._open(row) for row in addresses if row.host == own.host}
            self._home = {expert: row.ep_rank for row in addresses for expert in row.experts}
            # All have opened all: only now may the paths go.
            exchange(None)
        finally:
            os.close(descriptor)

    @property
    def num_bytes(self) -> int:
        """Of this rank's own mirror."""
        return self._layout.num_bytes

    def invalidate(self) -> None:
        """The weights are about to change: what lies here is of no version until `write`."""
        struct.pack_into("<I", self._own, _STATE_OFFSET, 0)

    def write(self, weight_version: str) -> None:
        """Copy the whole block, which this rank must hold. Device memory is read, so it waits for it."""
        self.invalidate()
        slots = self._experts.slots
        for own, expert in enumerate(self._block):
            tensors = self._tensors(slots.index(expert))
            for (_, offset, size, checksum), tensor in zip(self._layout.places(own), tensors, strict=True):
                data = _bytes_of(tensor)
                self._own[offset : offset + size] = data
                struct.pack_into("<I", self._own, checksum, zlib.crc32(data))
        self.rename(weight_version)

    def rename(self, weight_version: str) -> None:
        """The same weights under another version."""
        name = weight_version.encode("utf-8")
        if len(name) > 256:
            raise ValueError(f"weight_version of {len(name)} bytes, at most 256 are mirrored")
        _HEADER.pack_into(self._own, 0, _MAGIC, self._nonce, 1, name)

    def restore(
        self,
        rows: Sequence[tuple[int, int]],
        weight_version: str,
        fill: Callable[[int, int], list[torch.Tensor]],
    ) -> int:
        """Fill expert slots from the mirrors of this host; returns the bytes.

        Args:
            rows: (slot, expert) to fill.
            fill: the tensors of a slot in a layer, to be written in place.

        Raises MirrorUnusable where an expert's mirror is on another host, of another version or damaged. Then
        some slots may have been filled.
        """
        num_bytes = 0
        for slot, expert in rows:
            mirror, own = self._mirror_of(expert, weight_version)
            targets = [tensor for layer in range(self._experts.num_layers) for tensor in fill(layer, slot)]
            for (layer, offset, size, checksum), target in zip(
                self._layout.places(own), targets, strict=True
            ):
                _write(target, mirror[offset : offset + size])
                # Of what lies in the slot now, not of what was read: a loader may drop rows in silence.
                found, wanted = zlib.crc32(_bytes_of(target)), struct.unpack_from("<I", mirror, checksum)[0]
                if found != wanted:
                    raise MirrorUnusable(
                        f"expert {expert} of MoE layer {layer}, restored from the host mirror of ep_rank "
                        f"{self._home[expert]}, has checksum {found:08x}, not {wanted:08x}"
                    )
                num_bytes += size
        return num_bytes

    def _mirror_of(self, expert: int, weight_version: str) -> tuple[mmap.mmap, int]:
        home = self._home[expert]
        mirror = self._mirrors.get(home)
        if mirror is None:
            raise MirrorUnusable(
                f"expert {expert} is mirrored by ep_rank {home} on another host, which this one cannot read"
            )
        _, _, is_whole, name = _HEADER.unpack_from(mirror, 0)
        version = name.rstrip(b"\0").decode("utf-8")
        if not is_whole or version != weight_version:
            held = f"weight_version {version}" if is_whole else "a block that was never finished"
            raise MirrorUnusable(
                f"ep_rank {home}'s host mirror of expert {expert} holds {held}, and weight_version "
                f"{weight_version} is served: the rank was lost during a weight update"
            )
        return mirror, expert - min(row for row, at in self._home.items() if at == home)

    def _open(self, address: MirrorAddress) -> mmap.mmap:
        descriptor = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mirror = mmap.mmap(descriptor, self._layout.num_bytes)
        finally:
            os.close(descriptor)
        magic, nonce, _, _ = _HEADER.unpack_from(mirror, 0)
        assert (magic, nonce) == (_MAGIC, address.nonce), "another process's memory under the same path"
        return mirror

    def _tensors(self, slot: int) -> list[torch.Tensor]:
        return [
            tensor
            for layer in range(self._experts.num_layers)
            for tensor in self._experts.tensors_to_send(layer, slot)
        ]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _write(target: torch.Tensor, data: bytes) -> None:
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(target.dtype).view(target.shape)
    with torch.inference_mode():
        target.copy_(source)


def _host() -> str:
    """This boot of this machine and this pid namespace: where paths of processes mean the same."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    space = "?"
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{boot} {space}"
