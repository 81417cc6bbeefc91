"""The process group in which trainer rank 0 broadcasts weights to every rank of an SGLang server."""

import datetime
import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

GROUP_TIMEOUT = datetime.timedelta(seconds=300)

_numbers = itertools.count()


class WeightGroup:
    """Rank 0 is this process, ranks 1.. are those of the server."""

    def __init__(self, name: str, group: dist.ProcessGroup, store: c10d.Store) -> None:
        self.name = name
        self._group = group
        # The group's own store; it must live as long as the group.
        self._store = store
        self._requests = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    @classmethod
    def join(
        cls,
        server_url: str,
        num_server_ranks: int,
        backend: str,
        timeout_s: float,
        request: Callable[[dict[str, object]], None],
    ) -> "WeightGroup":
        """Build the group together with the server.

        Args:
            request: sends /init_weights_update_group with the given body; it returns once the server's ranks
                have joined, so it runs beside our own joining.

        Raises:
            RuntimeError: the group did not come together; or what `request` raises.
        """
        address = own_address(server_url)
        world_size = 1 + num_server_ranks
        timeout = datetime.timedelta(seconds=timeout_s)
        # Not by torch's rendezvous(): under torchrun it would look for torchrun's store instead.
        store = TCPStore(address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        name = f"flexfloor_weights_{next(_numbers)}_{store.port}"
        body: dict[str, object] = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(request, body)
            joined = _in_thread(name, lambda: _new_group(backend, store, name, world_size, answer))
            both: list[Future[Any]] = [answer, joined]
            wait(both, return_when=FIRST_COMPLETED)
            # A server that refuses never joins, and its reason must not wait for the group's deadline.
            if answer.done():
                answer.result()
            group = joined.result()
            answer.result()
        return cls(name, group, store)

    def broadcast(self, tensors: list[Tensor], request: Callable[[], None]) -> None:
        """Send the tensors' bytes, end to end, while `request` tells the server to receive them.

        Raises: what `request` raises; the group is then of no more use.
        """
        flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])
        answer = self._requests.submit(request)
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        # First the answer: a server that refuses never receives, and the broadcast would hide why.
        answer.result()
        work.wait()


def _in_thread(name: str, make: Callable[[], dist.ProcessGroup]) -> "Future[dist.ProcessGroup]":
    """In a thread that can be given up: nothing breaks off the wait for ranks that never come."""
    made: Future[dist.ProcessGroup] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            made.set_result(make())
        # Handed over to the thread that waits.
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


def own_address(server_url: str) -> str:
    """The address under which the server's host reaches this one."""
    parts = urlsplit(server_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])


def _new_group(
    backend: str, store: c10d.Store, name: str, world_size: int, answer: "Future[None]"
) -> dist.ProcessGroup:
    """A group beside the default one, whose members are not members of it.

    torch has no public call for this; these helpers have been what RL frameworks use for years.
    """
    # Any, because these helpers are private to torch and have no types.
    private: Any = c10d
    try:
        group: dist.ProcessGroup
        group, _ = private._new_process_group_helper(
            world_size,
            0,
            [],
            backend,
            private.PrefixStore(name, store),
            group_name=name,
            timeout=GROUP_TIMEOUT,
        )
    except RuntimeError:
        # The server's own message, if it has one by now, says more.
        if answer.done():
            answer.result()
        raise
    private._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
