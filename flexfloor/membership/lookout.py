"""Which ranks count as lost, and when: processes that ended, and silent ones, which are made to end first."""

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from flexfloor.membership.peers import AgentPeer, Peers

logger = logging.getLogger(__name__)

FENCE_TIMEOUT_S = 10.0
"""A fenced process that has not ended by then counts as lost: it may hang in the kernel."""
EXIT_GRACE_S = 1.0
"""A rank that is on its way out may be seen to end before its last report is read."""


class Processes(Protocol):
    """ProcessWatch, or what plays it."""

    def add(self, ep_rank: int, pid: int) -> None: ...
    def watches(self, ep_rank: int) -> bool: ...
    def ended(self) -> list[int]: ...
    def kill(self, ep_rank: int) -> None: ...


class Lookout:
    """See Manager for the arguments."""

    def __init__(
        self,
        peers: Peers,
        processes: Processes,
        *,
        node: str,
        heartbeat_timeout_s: float,
        on_fence_rank: Callable[[int, int], None] | None,
    ) -> None:
        self._peers = peers
        self._processes = processes
        self._node = node
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_fence_rank = on_fence_rank

    def add(self, peer: AgentPeer) -> None:
        if self._node and peer.hello.node == self._node:
            self._processes.add(peer.ep_rank, peer.hello.pid)

    def fence(self, peer: AgentPeer, reason: str, now_s: float) -> None:
        """See to it that the process ends; it counts as lost when it has."""
        if peer.lost_at_s is not None:
            return
        logger.warning("ep_rank=%d fenced: %s", peer.ep_rank, reason)
        is_here = self._processes.watches(peer.ep_rank)
        peer.lost_reason = reason
        peer.lost_at_s = now_s + (FENCE_TIMEOUT_S if is_here else 0.0)
        if self._on_fence_rank is not None:
            self._on_fence_rank(peer.ep_rank, peer.hello.pid)
        else:
            self._processes.kill(peer.ep_rank)

    def lost(self, now_s: float, is_exiting: Callable[[int], bool]) -> Iterator[tuple[AgentPeer, str]]:
        """Ranks that count as lost from now on, with the reason, each once."""
        for ep_rank in self._processes.ended():
            peer = self._peers.agents.get(ep_rank)
            if peer is not None:
                peer.lost_reason = peer.lost_reason or f"its process (pid {peer.hello.pid}) has ended"
                peer.lost_at_s = now_s + (EXIT_GRACE_S if is_exiting(ep_rank) else 0.0)
        for peer in list(self._watched()):
            silent_s = now_s - peer.seen_at_s
            if peer.lost_at_s is None and silent_s >= self._heartbeat_timeout_s:
                self.fence(peer, f"silent for {silent_s:.0f} s", now_s)
            if peer.lost_at_s is not None and now_s >= peer.lost_at_s:
                peer.is_watched = False
                yield peer, peer.lost_reason

    def next_deadline_s(self) -> float | None:
        deadlines_s = [
            peer.seen_at_s + self._heartbeat_timeout_s if peer.lost_at_s is None else peer.lost_at_s
            for peer in self._watched()
        ]
        return min(deadlines_s, default=None)

    def _watched(self) -> Iterator[AgentPeer]:
        return (peer for peer in self._peers.agents.values() if peer.is_watched)
