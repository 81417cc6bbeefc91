"""Moves tensors between ranks while the model decodes, over a group that the model never uses.

Every rank runs the same list of exchanges in the same order in its background thread, so sends and receives
always find each other, also those of a change that is cancelled meanwhile.

On a GPU it is a NCCL group on a stream of its own. Not yet run on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sglang_patches.elastic.groups import GroupFactory


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor to send to a rank, or to receive from it in place."""

    tensor: torch.Tensor
    peer: int
    tag: int
    """The same on both sides, and unique among the moves in flight between the two."""


class TransferGroup:
    """All live ranks, for point-to-point copies. Making it is collective over all of them.

    A pair with a lost rank fails; the copies between all others go on.

    Not yet run on a GPU. NCCL's rules there: the first call of a group is made by all its ranks, or those who
    make it wait for the rest for ever; and whoever calls has set its thread's device.
    """

    def __init__(
        self, groups: GroupFactory, ranks: Sequence[int], device: torch.device, generation: int = 0
    ) -> None:
        backend = "gloo" if device.type == "cpu" else "nccl"
        name = f"flexfloor:transfer:{'.'.join(map(str, ranks))}:{generation}"
        self._group = groups.process_group(ranks, name, backend)
        self._place = {rank: place for place, rank in enumerate(ranks)}
        """Rank of the world -> rank in the group."""
        self.device = device
        # A stream of its own: a copy must neither wait for the model's kernels nor hold them up.
        self._stream: Any = (
            None if device.type == "cpu" else torch.get_device_module(device).Stream(device=device)
        )
        self._connect(ranks)

    def settle(self) -> None:
        """Wait for what the model has launched so far: it may still read the slots that a copy writes to."""
        if self._stream is not None:
            torch.get_device_module(self.device).synchronize(self.device)

    def exchange(self, sends: Sequence[Move], receives: Sequence[Move]) -> int:
        """Do all moves and wait for them; returns the bytes received."""
        if self._stream is None:
            self._exchange_on_cpu(sends, receives)
        else:
            self._exchange_on_device(sends, receives)
        return sum(move.tensor.nbytes for move in receives)

    def _connect(self, ranks: Sequence[int]) -> None:
        """Copy one number between all pairs now, so that no copy has to connect while the model decodes."""
        own = dist.get_rank()
        peers = [rank for rank in ranks if rank != own]
        sent = torch.zeros(1, device=self.device)
        received = [torch.zeros(1, device=self.device) for _ in peers]
        self.exchange(
            [Move(sent, peer, 0) for peer in peers],
            [Move(tensor, peer, 0) for tensor, peer in zip(received, peers, strict=True)],
        )

    def _exchange_on_cpu(self, sends: Sequence[Move], receives: Sequence[Move]) -> None:
        place = self._place
        works = [self._group.recv([move.tensor], place[move.peer], move.tag) for move in receives]
        works += [self._group.send([move.tensor], place[move.peer], move.tag) for move in sends]
        for work in works:
            work.wait()

    def _exchange_on_device(self, sends: Sequence[Move], receives: Sequence[Move]) -> None:
        # NCCL has no tags: both sides list the moves of a pair in the same order.
        moves = [(move, dist.isend) for move in sends] + [(move, dist.irecv) for move in receives]
        moves.sort(key=lambda row: (row[0].tag, row[0].peer))
        operations = [
            dist.P2POp(call, move.tensor, group=self._group, group_peer=self._place[move.peer])
            for move, call in moves
        ]
        if not operations:
            return
        module = torch.get_device_module(self.device)
        # What is sent or overwritten was last touched on the stream of this thread, if at all.
        self._stream.wait_stream(module.current_stream(self.device))
        with module.stream(self._stream):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        self._stream.synchronize()
