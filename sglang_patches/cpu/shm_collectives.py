"""Collectives over memory that the ranks of one host share, for many ranks on few cores.

Rule 1: every rank calls the same collectives with the same sizes in the same order.
Rule 2: sums run in rank order on every rank, so all ranks hold bit-equal results.
Rule 3: no wait is blind: a dead peer, another rank's abort and a deadline each end it with PeerLostError.

Why two slots per rank are enough and nobody acknowledges a read: a rank posts exchange k + 1 only after it
has read all of exchange k, and writes exchange k + 2, which reuses k's slot, only after all posted k + 1.

Stores become visible in program order on x86-64, which the counters rely on; other machines are refused.
"""

import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from flexfloor.errors import FlexfloorError
from sglang_patches.cpu import futex

DEFAULT_SLOT_BYTES = 1 << 20
DEFAULT_DEADLINE_S = 1800.0
"""As long as a rank may compute between two collectives, e.g. while another loads weights."""

_LINE_BYTES = 64
_WORD_MASK = 0xFFFF_FFFF
_NOBODY_KNOWN = 1 << 32
"""In place of a lost rank's number: the group was broken by order."""
_LIVENESS_INTERVAL_S = 0.2
_ACCUMULATE_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class PeerLostError(FlexfloorError):
    """A rank of the group died, gave up or did not arrive in time; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One life of a process: a pid alone may be given to another process later."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Raises ProcessLookupError when there is no live process with this pid."""
        stat = _read_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no live process {pid}")
        return cls(pid=pid, start_ticks=stat)

    def is_alive(self) -> bool:
        """False also for a zombie: it computes no more, whether or not its parent has noticed."""
        return _read_stat(self.pid) == self.start_ticks


def _read_stat(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Anonymous shared memory, open in this process. It vanishes with the last process that maps it."""

    descriptor: int
    path: str
    """Under which other processes of this user can open it, while this process keeps it open."""
    num_bytes: int

    @classmethod
    def create(cls, world_size: int, slot_bytes: int = DEFAULT_SLOT_BYTES) -> "Segment":
        """Zeroed memory, readable and writable by this user only."""
        num_bytes = (world_size + 1) * _LINE_BYTES + 2 * world_size * slot_bytes
        descriptor = os.memfd_create("flexfloor_collectives", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, num_bytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return cls(descriptor=descriptor, path=path, num_bytes=num_bytes)

    def close(self) -> None:
        """Take the path away; mappings stay."""
        os.close(self.descriptor)


@dataclass(slots=True, kw_only=True)
class SharedMemoryGroup:
    """This rank's end of a group. Not thread-safe, as the collectives of one rank are a sequence."""

    rank: int
    peers: Sequence[ProcessIdentity]
    """Process of each rank, this one included."""
    slot_bytes: int
    deadline_s: float
    _memory: mmap.mmap
    _posted: np.ndarray = field(init=False)  # [world_size + 1], uint64: exchanges posted; last: dead rank + 1
    _slots: list[list[torch.Tensor]] = field(init=False)  # [rank][parity] -> uint8 [slot_bytes]
    _num_posted: int = 0
    _base_address: int = 0

    def __post_init__(self) -> None:
        lines = np.frombuffer(self._memory, dtype=np.uint64, count=(self.world_size + 1) * _LINE_BYTES // 8)
        self._posted = lines[:: _LINE_BYTES // 8]
        self._base_address = lines.ctypes.data
        first = (self.world_size + 1) * _LINE_BYTES
        self._slots = [
            [self._slot(first + (2 * rank + parity) * self.slot_bytes) for parity in (0, 1)]
            for rank in range(self.world_size)
        ]

    @classmethod
    def attach(
        cls,
        path: str,
        rank: int,
        peers: Sequence[ProcessIdentity],
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> "SharedMemoryGroup":
        """Map the segment at `path` as this rank. Raises OSError when that is impossible."""
        if platform.machine() not in ("x86_64", "AMD64"):
            raise OSError(f"shared-memory collectives need x86-64, this is {platform.machine()}")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        return cls(rank=rank, peers=peers, slot_bytes=slot_bytes, deadline_s=deadline_s, _memory=memory)

    @property
    def world_size(self) -> int:
        return len(self.peers)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place. Returns it."""
        self._reduce(tensor, tensor, offset=0)
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor, offset: int) -> torch.Tensor:
        """Sum rows `offset : offset + len(output)` of every rank's `tensor` into `output`, and return it."""
        row_numel = tensor[0].numel() if tensor.shape[0] else 0
        self._reduce(tensor, output, offset=offset * row_numel)
        return output

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill the contiguous `output` with every rank's equally sized `tensor`, in rank order."""
        source = _bytes_of(tensor.contiguous())
        parts = _bytes_of(output).view(self.world_size, source.numel())
        for start in range(0, source.numel(), self.slot_bytes):
            chunk = source[start : start + self.slot_bytes]
            with self._exchange(chunk) as rows:
                for part, row in zip(parts, rows, strict=True):
                    part[start : start + chunk.numel()].copy_(row)

    def abort(self) -> None:
        """End every rank's wait with PeerLostError, now and in every later exchange. From any thread."""
        self._posted[-1] = _NOBODY_KNOWN if not self._posted[-1] else self._posted[-1]
        for rank in range(self.world_size):
            futex.wake_all(self._word(rank))

    def _reduce(self, tensor: torch.Tensor, output: torch.Tensor, offset: int) -> None:
        source = _bytes_of(tensor.contiguous())
        result = output if output.is_contiguous() else torch.empty_like(output).contiguous()
        flat = result.view(-1)
        item_bytes = tensor.element_size()
        step = self.slot_bytes // item_bytes * item_bytes
        for start in range(0, source.numel(), step):
            with self._exchange(source[start : start + step]) as rows:
                first = start // item_bytes
                last = first + rows[0].numel() // item_bytes
                lo, hi = max(first, offset), min(last, offset + flat.numel())
                if lo < hi:
                    parts = [row.view(tensor.dtype)[lo - first : hi - first] for row in rows]
                    flat[lo - offset : hi - offset] = _sum_in_order(parts)
        if result is not output:
            output.copy_(result)

    @contextmanager
    def _exchange(self, payload: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Post this rank's bytes and yield every rank's, valid until the block ends."""
        parity = (self._num_posted + 1) % 2
        self._slots[self.rank][parity][: payload.numel()].copy_(payload)
        self._num_posted += 1
        self._posted[self.rank] = self._num_posted
        futex.wake_all(self._word(self.rank))
        for peer in range(self.world_size):
            if self._posted[peer] < self._num_posted:
                self._wait_for(peer)
        yield [slots[parity][: payload.numel()] for slots in self._slots]

    def _wait_for(self, peer: int) -> None:
        started_s = time.monotonic()
        next_check_s = started_s + _LIVENESS_INTERVAL_S
        while (seen := int(self._posted[peer])) < self._num_posted:
            if self._posted[-1]:
                lost = int(self._posted[-1])
                whom = "the group was broken" if lost == _NOBODY_KNOWN else f"rank {lost - 1} was lost"
                raise PeerLostError(f"rank {self.rank}: {whom}, at exchange {self._num_posted}")
            futex.wait(self._word(peer), seen & _WORD_MASK, _LIVENESS_INTERVAL_S)
            if time.monotonic() >= next_check_s:
                next_check_s = time.monotonic() + _LIVENESS_INTERVAL_S
                self._check_peers(peer, waited_s=time.monotonic() - started_s)

    def _check_peers(self, awaited: int, waited_s: float) -> None:
        for rank, peer in enumerate(self.peers):
            if not peer.is_alive():
                self._abort(rank, f"rank {rank} (pid {peer.pid}) died")
        if waited_s > self.deadline_s:
            self._abort(awaited, f"rank {awaited} did not arrive within {self.deadline_s:g} s")

    def _abort(self, lost_rank: int, reason: str) -> None:
        self._posted[-1] = lost_rank + 1
        for rank in range(self.world_size):
            futex.wake_all(self._word(rank))
        raise PeerLostError(f"rank {self.rank}: {reason}, at exchange {self._num_posted}")

    def _word(self, rank: int) -> int:
        """Address of the lower half of a rank's counter, which is its futex."""
        return self._base_address + rank * _LINE_BYTES

    def _slot(self, offset: int) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=self.slot_bytes, offset=offset)


def connect(
    rank: int, world_size: int, all_gather_object: Callable[[object], list[object]]
) -> SharedMemoryGroup:
    """Build a group among processes that can already exchange small objects. Every rank must call it."""
    segment = Segment.create(world_size) if rank == 0 else None
    rows = all_gather_object((ProcessIdentity.of(os.getpid()), segment.path if segment else None))
    peers = [row[0] for row in rows]  # type: ignore[index]
    group = SharedMemoryGroup.attach(rows[0][1], rank, peers)  # type: ignore[index]
    all_gather_object(None)  # all have mapped it: only now may the path go
    if segment is not None:
        segment.close()
    return group


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    accumulate_in = _ACCUMULATE_IN.get(parts[0].dtype, parts[0].dtype)
    total = parts[0].to(accumulate_in, copy=True)
    for part in parts[1:]:
        total += part
    return total
