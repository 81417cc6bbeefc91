"""Communication groups per member set, made without torch's naming of groups.

Invariant: a group's key in the store is made of its members and the membership_epoch that first used it.
Ranks agree on both, whatever groups each of them made before. (torch names a group by how many groups a rank
has made so far, so ranks with different histories would look for each other under different names for ever.)
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

MODEL_GROUP = "tp"
"""With EP = attention-DP = TP one group carries every collective of the model and of the scheduler."""


class GroupFactory:
    """Makes and keeps the groups of one rank. One thread at a time makes groups."""

    def __init__(self, store: distributed_c10d.Store, *, timeout_s: float) -> None:
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._coordinators: dict[tuple[int, ...], Any] = {}
        self._making = threading.Lock()

    def keep(self, members: tuple[int, ...], coordinator: Any) -> None:
        """Use this SGLang group for the member set: the one it was launched with."""
        self._coordinators[members] = coordinator

    def coordinator(self, members: tuple[int, ...], membership_epoch: int) -> Any:
        """SGLang's GroupCoordinator of this member set, ready for its first collective.

        The first call for a set is collective: every member makes it, with the same epoch.
        """
        if members not in self._coordinators:
            self._coordinators[members] = self._make_coordinator(members, membership_epoch)
        return self._coordinators[members]

    def process_group(self, members: Sequence[int], name: str, backend: str) -> dist.ProcessGroup:
        """A torch group under an explicit name. Collective over its members."""
        group: dist.ProcessGroup
        group, _ = distributed_c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            list(members),
            distributed_c10d.Backend(backend),
            self._store,
            group_name=distributed_c10d.GroupName(name),
            timeout=self._timeout,
            group_desc=name,
        )
        # What new_group does besides: SGLang passes ranks of the world as sources.
        distributed_c10d._world.pg_group_ranks[group] = {
            world_rank: group_rank for group_rank, world_rank in enumerate(members)
        }
        return group

    def _make_coordinator(self, members: tuple[int, ...], membership_epoch: int) -> Any:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import get_parallel

        launched = get_parallel().world_group
        prefix = f"flexfloor:{'.'.join(map(str, members))}:{membership_epoch}"
        with self._making, self._explicit_names(prefix):
            coordinator = parallel_state.init_model_parallel_group(
                [list(members)],
                launched.local_rank,
                dist.get_backend(launched.device_group),
                group_name=MODEL_GROUP,
            )
        connect(coordinator)
        return coordinator

    @contextmanager
    def _explicit_names(self, prefix: str) -> Iterator[None]:
        """Route this thread's torch.distributed.new_group through `process_group`."""
        original: Callable[..., Any] = dist.new_group
        thread = threading.get_ident()

        def new_group(
            ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any
        ) -> Any:
            if threading.get_ident() != thread:
                return original(ranks, timeout, backend, *args, **options)
            kind = str(options.get("group_desc", "")).rpartition(":")[2]
            return self.process_group(ranks, f"{prefix}:{kind}", backend)

        dist.new_group = new_group
        try:
            yield
        finally:
            dist.new_group = original


def connect(coordinator: Any) -> None:
    """Run the first collectives of a new group now, so that none of them has to connect during decoding."""
    if coordinator.world_size == 1:
        return
    dist.barrier(group=coordinator.cpu_group)
    warmed = torch.zeros(1, device=coordinator.device)
    coordinator.all_reduce(warmed)
    if coordinator.device.type != "cpu":
        # SGLang may have reduced by a communicator of its own; torch's connects at its first collective only.
        dist.all_reduce(warmed, group=coordinator.device_group)
        torch.get_device_module(coordinator.device).synchronize()


def barrier(coordinator: Any) -> None:
    """Wait until every member has come this far."""
    dist.barrier(group=coordinator.cpu_group)


def gather_objects(coordinator: Any, value: object) -> list[Any]:
    """Every member's value, in group order; also a barrier. For a group that is not yet in use."""
    gathered: list[Any] = [None] * coordinator.world_size
    dist.all_gather_object(gathered, value, group=coordinator.cpu_group)
    return gathered


def restamp(scheduler: Any, coordinator: Any) -> None:
    """Make the group the one that SGLang works in: sizes and ranks for whoever asks, copies where kept."""
    from sglang.srt.runtime_context import get_parallel

    size, rank = coordinator.world_size, coordinator.rank_in_group
    get_parallel().override_permanently(
        tp_group=coordinator,
        moe_ep_group=coordinator,
        **dict.fromkeys(("tp_size", "attn_dp_size", "moe_ep_size", "ep_size", "num_dp_ranks"), size),
        **dict.fromkeys(("tp_rank", "attn_dp_rank", "moe_ep_rank"), rank),
    )
    for owner in (scheduler, scheduler.weight_updater):
        for name in ("tp_group", "tp_cpu_group"):
            if hasattr(owner, name):
                setattr(owner, name, coordinator if name == "tp_group" else coordinator.cpu_group)
    scheduler.tp_size = size
