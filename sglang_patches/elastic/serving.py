"""The membership manager inside the server's main process, and what it keeps in step there.

    manager thread --routing--> event loop --(tokenizer manager's own socket)--> data-parallel controller
    control calls  --fence----> manager: no change while one is pending, full membership where it is needed

Routing goes over the socket that requests and control calls use, so the controller sees all three in order.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flexfloor.membership.endpoint import Endpoint
from flexfloor.membership.manager import Manager
from flexfloor.membership.state import Membership
from flexfloor.membership.status import MembershipStatus, OperationResult
from sglang_patches import CONFIG_ENV, plugin_config
from sglang_patches.elastic import group_store, routing
from sglang_patches.elastic.losses import Losses
from sglang_patches.elastic.topology import no_recovery, num_experts_of

logger = logging.getLogger(__name__)

_FULL = frozenset(
    {
        "InitWeightsUpdateGroupReqInput",
        "DestroyWeightsUpdateGroupReqInput",
        "InitWeightsSendGroupForRemoteInstanceReqInput",
        "SendWeightsToRemoteInstanceReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "UpdateWeightsFromTensorReqInput",
        "UpdateWeightsFromIPCReqInput",
        "UpdateWeightVersionReqInput",
        "BeginWeightUpdateReqInput",
        "EndWeightUpdateReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
    }
)
"""Calls that every rank must see: a rank that missed one would serve other weights than the rest."""
_HELD_UNTIL = {
    "BeginWeightUpdateReqInput": "EndWeightUpdateReqInput",
    "ReleaseMemoryOccupationReqInput": "ResumeMemoryOccupationReqInput",
    "PauseGenerationReqInput": "ContinueGenerationReqInput",
}
"""Calls after which nothing may change until their counterpart: ranks in between cannot vote or copy."""

_current: "ServerMembership | None" = None


def current() -> "ServerMembership | None":
    """The server's membership; None outside the main process."""
    return _current


def start(
    tokenizer_manager: Any,
    on_status: Callable[[MembershipStatus], None],
    on_result: Callable[[OperationResult], None],
    on_abandon: Callable[[int], None],
) -> "ServerMembership":
    """Start the manager. The ranks say hello to it as they become ready; see Manager for the callbacks.

    `on_abandon` is called on the event loop, the others in the manager's thread.
    """
    global _current
    _current = ServerMembership(tokenizer_manager, on_status, on_result, on_abandon)
    return _current


class CallRefused(RuntimeError):
    """A control call that some rank could not take part in any more."""


class ServerMembership:
    """Manager, routing and fences of one server."""

    def __init__(
        self,
        tokenizer_manager: Any,
        on_status: Callable[[MembershipStatus], None] = lambda _status: None,
        on_result: Callable[[OperationResult], None] = lambda _result: None,
        on_abandon: Callable[[int], None] = lambda _ep_rank: None,
    ) -> None:
        from sglang.srt.runtime_context import get_parallel

        config = plugin_config.read(os.environ[CONFIG_ENV])
        self._tokenizer_manager = tokenizer_manager
        self._num_ranks = get_parallel().tp_size
        self._unsent: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._held: dict[str, str] = {}
        self._on_abandon = on_abandon
        self.losses = Losses(tokenizer_manager)
        problem = no_recovery(config.device)
        self.recovers = config.recovers and not problem
        """Whether the other ranks go on when one is lost."""
        if config.recovers and problem:
            logger.warning("flexfloor: a lost rank ends the server: %s", problem)
        endpoint = Endpoint.read(Path(config.folder))
        self._store = group_store.host(endpoint)
        """Kept: it ends with the object."""
        membership = Membership(
            ep_size=self._num_ranks,
            floor=config.floor,
            num_experts=num_experts_of(tokenizer_manager.model_config.hf_text_config),
            prepare_timeout_s=config.prepare_timeout_s,
            recovers=self.recovers,
        )
        self.manager = Manager(
            endpoint,
            membership,
            on_routing=self._on_routing,
            on_fail=self._end_server,
            on_status=on_status,
            on_result=on_result,
            on_abandon=self._abandon,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        self.manager.start()

    def loop_started(self) -> None:
        """The event loop runs: send the routing that had to wait for it."""
        if self._unsent is not None:
            self._send_routing(*self._unsent)

    def is_rank(self, pid: int) -> bool:
        """Whether this process is a rank that has said hello: whoever watches it, the manager does too."""
        return any(hello.pid == pid for hello in self.manager.hellos().values())

    def targets(self) -> tuple[int, ...]:
        """Who may get a request: those who are routed to, or while nobody is, any rank that is not gone.

        Nobody is between the loss of the last member and the return of a parked rank: there it waits.
        """
        status = self.manager.status()
        gone = ("lost", "exited")
        return status.routed or tuple(
            rank for rank, state in sorted(status.states.items()) if str(state) not in gone
        )

    def shut_down(self) -> None:
        """The server ends in good order, and its ranks with it."""
        self.manager.stand_down()

    @asynccontextmanager
    async def fence(self, request_name: str) -> AsyncIterator[int]:
        """No membership change inside; yields the number of ranks that will answer."""
        fence_id = await asyncio.wrap_future(self.manager.fence(full=self._needs_full(request_name)))
        status = self.manager.status()
        refusal = self._refusal(request_name, status.states)
        if refusal:
            # Not `_let_go`: a call that was never made has no counterpart to wait for.
            self.manager.unfence(fence_id)
            raise CallRefused(refusal)
        try:
            yield len(status.members)
        finally:
            self._let_go(request_name, fence_id)

    def record_weights(self, weight_version: object) -> None:
        """An update has reached every rank."""
        if weight_version is not None:
            self.manager.weights_updated(str(weight_version))

    def _needs_full(self, request_name: str) -> bool:
        return request_name in _FULL or request_name == "PauseGenerationReqInput"

    def _refusal(self, request_name: str, states: Any) -> str:
        """Empty: every rank that must see the call will."""
        gone = [str(rank) for rank, state in sorted(states.items()) if str(state) in ("exited", "lost")]
        if not gone or request_name not in _FULL:
            return ""
        return (
            f"{request_name}: ep_rank {', '.join(gone)} has left for good, so its experts could not be "
            "updated. Fix: restart the server, or park ranks instead of letting them exit."
        )

    def _let_go(self, request_name: str, fence_id: str) -> None:
        for first, last in _HELD_UNTIL.items():
            if request_name == last and first in self._held:
                self.manager.unfence(self._held.pop(first))
        if request_name in _HELD_UNTIL and request_name not in self._held:
            self._held[request_name] = fence_id
        else:
            self.manager.unfence(fence_id)

    def _on_routing(self, ep_ranks: tuple[int, ...], members: tuple[int, ...]) -> None:
        self._unsent = (ep_ranks, members)
        loop = self._tokenizer_manager.event_loop
        if loop is not None:
            loop.call_soon_threadsafe(self._send_routing, ep_ranks, members)

    def _abandon(self, ep_rank: int) -> None:
        loop = self._tokenizer_manager.event_loop
        if loop is not None:
            loop.call_soon_threadsafe(self._on_abandon, ep_rank)

    def _end_server(self, reason: str) -> None:
        if self._tokenizer_manager.gracefully_exit:
            return
        logger.critical("flexfloor: %s", reason)
        # SGLang's diagnostics of a hang take over a minute, and this reason is known.
        for name in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
            os.environ.setdefault(name, "0")
        # SGLang's own way to end: its handler kills the whole process tree.
        os.kill(os.getpid(), signal.SIGQUIT)

    def _send_routing(self, ep_ranks: tuple[int, ...], members: tuple[int, ...]) -> None:
        from sglang.srt.managers.io_struct import ActiveRanksOutput

        self._unsent = None
        status = routing.encode(ep_ranks, members, self._num_ranks)
        self._tokenizer_manager.update_active_ranks(ActiveRanksOutput(status=status))
