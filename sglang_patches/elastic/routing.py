"""The data-parallel controller's part: where a request may go, and where a control call enters the group.

The message that SGLang has for it holds one flag a rank; ours holds two, first who is routed to, then who is
a member. A draining rank is a member that is not routed to.
"""

import logging
from collections.abc import Callable, Collection
from copy import copy
from typing import Any

import zmq

_MEMBERS = "_flexfloor_members"
_INACTIVE = "_flexfloor_inactive"
_NEVER = 1 << 60
PEER_TIMEOUT_MS = 100
"""A live rank's socket takes any number of messages at once."""

logger = logging.getLogger(__name__)


class WorkerSocket:
    """The controller's socket to one rank, which never waits for a rank that is gone.

    ZeroMQ lets a sender without a peer wait for one for ever, and with the controller everybody's requests
    would wait. What is dropped here is ended at its client by the main process, which knows of the loss.
    """

    def __init__(self, socket: Any, ep_rank: int) -> None:
        self._socket = socket
        self._ep_rank = ep_rank

    def send(self, data: Any, flags: int = 0) -> None:
        """As the socket's own `send`."""
        if self._has_peer():
            self._socket.send(data, flags=flags)

    def send_pyobj(self, data: Any, flags: int = 0, **options: Any) -> None:
        """As the socket's own `send_pyobj`."""
        if self._has_peer():
            self._socket.send_pyobj(data, flags=flags, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def _has_peer(self) -> bool:
        found = bool(self._socket.poll(PEER_TIMEOUT_MS, zmq.POLLOUT))
        if not found:
            logger.warning("flexfloor dropped a message for ep_rank=%d, which is gone", self._ep_rank)
        return found


def encode(ep_ranks: Collection[int], members: Collection[int], num_ranks: int) -> list[bool]:
    """The flags of a message."""
    return [rank in chosen for chosen in (ep_ranks, members) for rank in range(num_ranks)]


def update(original: Callable[[Any, Any], None], controller: Any, message: Any) -> None:
    """Take in the flags, and make every policy skip the ranks that are not routed to."""
    num_ranks = len(controller.workers)
    for rank, socket in enumerate(controller.workers):
        if isinstance(socket, zmq.Socket):
            controller.workers[rank] = WorkerSocket(socket, rank)
    routed = copy(message)
    routed.status, members = list(message.status[:num_ranks]), message.status[num_ranks:]
    original(controller, routed)
    setattr(controller, _MEMBERS, [rank for rank, is_member in enumerate(members) if is_member])
    controller._refresh_active_workers()
    inactive = [rank for rank, is_routed in enumerate(controller.status) if not is_routed]
    setattr(controller.dp_budget, _INACTIVE, inactive)


def deliver_to_named_rank(original: Callable[..., bool], controller: Any, request: Any) -> bool:
    """A request that names its rank goes there: a parked rank is woken by it, a draining one serves it.

    SGLang would end the controller, and with it the server, where the rank is not active.
    """
    rank = request.routed_dp_rank
    if rank is None or rank in controller._active_workers:
        return original(controller, request)
    if not 0 <= rank < len(controller.workers) or controller.workers[rank] is None:
        return original(controller, request)
    from sglang.srt.managers.data_parallel_controller import sock_send

    sock_send(controller.workers[rank], request)
    return True


def send_control(original: Callable[[Any, Any], None], controller: Any, message: Any) -> None:
    """To the first member, from which the group broadcasts it.

    SGLang takes the first rank that is routed to: while the group's first rank drains that is another one,
    and what it says is lost in the broadcast.
    """
    members = getattr(controller, _MEMBERS, None)
    if not members:
        original(controller, message)
        return
    from sglang.srt.managers.data_parallel_controller import sock_send

    sock_send(controller.workers[members[0]], message)


def dispatch_to_active(original: Callable[..., Any], budget: Any, *args: Any, **kwargs: Any) -> Any:
    """The least loaded rank among those that are routed to."""
    inactive = getattr(budget, _INACTIVE, ())
    for counts in (budget.total_requests, budget.total_tokens):
        for rank in inactive:
            counts[rank] += _NEVER
    try:
        return original(budget, *args, **kwargs)
    finally:
        for counts in (budget.total_requests, budget.total_tokens):
            for rank in inactive:
                counts[rank] -= _NEVER
