"""Communication groups per member set, made without torch's naming of groups.

Invariant: a group's key in the store is made of its members, the membership_epoch that first used it and the
number of the recovery that it came from. Ranks agree on all three, whatever groups each of them made before.
(torch names a group by how many groups a rank has made so far, so ranks with different histories would look
for each other under different names for ever.)
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flexfloor.errors import FlexfloorError
from sglang_patches.cpu import gloo, shm_groups

MODEL_GROUP = "tp"
"""With EP = attention-DP = TP one group carries every collective of the model and of the scheduler."""


class GroupBroken(FlexfloorError):
    """A group was given up before it was made, since a rank of it may be lost."""


class GroupFactory:
    """Makes and keeps the groups of one rank. One thread at a time makes groups.

    Args:
        connect_store: a fresh client of the store; one that waits for a lost rank's key cannot be used again.
        timeout_s: of every wait in a group.
    """

    def __init__(self, connect_store: Callable[[], distributed_c10d.Store], *, timeout_s: float) -> None:
        self._connect_store = connect_store
        self._stores = [connect_store()]
        """The last one is in use; those before it may still be waited on by threads that were given up."""
        self._timeout = timedelta(seconds=timeout_s)
        self._coordinators: dict[tuple[int, ...], Any] = {}
        self._connections: set[gloo.Connection] = set()
        self._era = 0
        self._lock = threading.Lock()

    @property
    def era(self) -> int:
        """Grows with every break: what was begun in an earlier one is void."""
        return self._era

    def keep(self, members: tuple[int, ...], coordinator: Any) -> None:
        """Use this SGLang group for the member set: the one it was launched with."""
        self._coordinators[members] = coordinator

    def coordinator(self, members: tuple[int, ...], membership_epoch: int, generation: int = 0) -> Any:
        """SGLang's GroupCoordinator of this member set, ready for its first collective.

        The first call for a set is collective: every member makes it, with the same epoch and generation.
        """
        if members not in self._coordinators:
            era = self._era
            coordinator = self._make_coordinator(members, membership_epoch, generation)
            with self._lock:
                if era != self._era:
                    raise GroupBroken(f"the group of members={members} was broken while it was made")
                self._coordinators[members] = coordinator
        return self._coordinators[members]

    def process_group(self, members: Sequence[int], name: str, backend: str) -> dist.ProcessGroup:
        """A torch group under an explicit name. Collective over its members."""
        group: dist.ProcessGroup
        era = self._era
        with gloo.recorded() as connections:
            group, _ = distributed_c10d._new_process_group_helper(
                len(members),
                list(members).index(dist.get_rank()),
                list(members),
                distributed_c10d.Backend(backend),
                self._stores[-1],
                group_name=distributed_c10d.GroupName(name),
                timeout=self._timeout,
                group_desc=name,
            )
        # What new_group does besides: SGLang passes ranks of the world as sources.
        distributed_c10d._world.pg_group_ranks[group] = {
            world_rank: group_rank for group_rank, world_rank in enumerate(members)
        }
        with self._lock:
            is_void = era != self._era
            if not is_void:
                self._connections |= connections
        if is_void:
            gloo.break_connections(connections)
            raise GroupBroken(f"{name} was broken while it was made")
        return group

    def break_all(self) -> None:
        """End every wait in every group, here and at the peers. From any thread, as often as need be.

        Groups that another thread is making come to nothing; wait for that thread no longer than for a
        change of `era`.
        """
        with self._lock:
            self._era += 1
            connections, self._connections = self._connections, set()
            coordinators, self._coordinators = self._coordinators, {}
        for coordinator in coordinators.values():
            memory = getattr(coordinator, shm_groups.ATTRIBUTE, None)
            if memory is not None:
                memory.abort()
        gloo.break_connections(connections)

    def renew_store(self) -> None:
        """After a break, before the next group."""
        self._stores.append(self._connect_store())

    def _make_coordinator(self, members: tuple[int, ...], membership_epoch: int, generation: int) -> Any:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import get_parallel

        launched = get_parallel().world_group
        prefix = f"flexfloor:{'.'.join(map(str, members))}:{membership_epoch}:{generation}"
        with self._explicit_names(prefix):
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
        _install_new_group()

        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
            kind = str(options.get("group_desc", "")).rpartition(":")[2]
            return self.process_group(ranks, f"{prefix}:{kind}", backend)

        _own.new_group = new_group
        try:
            yield
        finally:
            del _own.new_group


_own = threading.local()
"""`new_group` of a thread that names its groups itself."""


def _install_new_group() -> None:
    """Once per process and for good: a thread that was given up may be inside when the next one begins."""
    original: Callable[..., Any] = dist.new_group
    if getattr(original, "is_flexfloors", False):
        return

    def new_group(*args: Any, **options: Any) -> Any:
        return getattr(_own, "new_group", original)(*args, **options)

    new_group.is_flexfloors = True  # type: ignore[attr-defined]
    dist.new_group = new_group


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
