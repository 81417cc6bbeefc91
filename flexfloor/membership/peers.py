"""Who talks to the manager: agents by rank, clients, and what was dropped of everybody else."""

import hmac
import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import msgspec

from flexfloor.membership import messages as m
from flexfloor.membership.session import Session

logger = logging.getLogger(__name__)

MAX_CLIENTS = 4096
"""Identities that are remembered: drivers come and go, and say no goodbye."""


@dataclass(slots=True, kw_only=True)
class AgentPeer:
    identity: bytes
    hello: m.HelloMsg
    """Without its token."""
    seen_at_s: float
    is_watched: bool = True
    """Its silence would be a loss."""
    loop_age_s: float = 0.0
    session: Session = field(default_factory=Session)
    lost_reason: str = ""
    """Why it counts as lost, or is being made to end."""
    lost_at_s: float | None = None
    """When it counts as lost at the latest; None: nothing is known against it."""

    @property
    def ep_rank(self) -> int:
        return self.hello.ep_rank


class Peers:
    """Identities that have shown the token. All else is dropped, counted, and logged once per reason."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._clients: OrderedDict[bytes, None] = OrderedDict()
        """Those that spoke last are at the end."""
        self.agents: dict[int, AgentPeer] = {}
        self.num_dropped: Counter[str] = Counter()

    def admit(self, identity: bytes, frames: list[bytes]) -> m.ManagerInMsg | None:
        """The message, if this peer may say it."""
        try:
            message = m.decode_from_peer(frames)
            self._check(identity, message)
        except m.BadFrame as error:
            self._count(error)
            return None
        return message

    def agent(self, identity: bytes) -> AgentPeer | None:
        return next((peer for peer in self.agents.values() if peer.identity == identity), None)

    def nodes(self) -> dict[int, str]:
        """ep_rank -> machine."""
        return {rank: peer.hello.node for rank, peer in sorted(self.agents.items())}

    def add_client(self, identity: bytes) -> None:
        self._clients[identity] = None
        while len(self._clients) > MAX_CLIENTS:
            # Its next request is dropped and counted; a client that is gone says nothing more.
            self._clients.popitem(last=False)

    def add_agent(self, identity: bytes, hello: m.HelloMsg, now_s: float) -> None:
        hello = msgspec.structs.replace(hello, token="")
        before = self.agents.get(hello.ep_rank)
        if before is not None and before.hello.incarnation == hello.incarnation:
            # The same process under another connection: what it has said and heard still counts.
            before.identity, before.seen_at_s = identity, now_s
        else:
            self.agents[hello.ep_rank] = AgentPeer(identity=identity, hello=hello, seen_at_s=now_s)

    def mismatch(self, hello: m.HelloMsg) -> str:
        """How this process differs from those that were taken in. Empty: it runs the same code."""
        for peer in self.agents.values():
            for name in ("flexfloor_version", "sglang_version", "patches"):
                mine, theirs = getattr(hello, name), getattr(peer.hello, name)
                if mine != theirs:
                    return f"ep_rank {hello.ep_rank}: {name} {mine}, ep_rank {peer.ep_rank}: {theirs}"
        return ""

    def _check(self, identity: bytes, message: m.ManagerInMsg) -> None:
        if isinstance(message, m.HelloMsg | m.ClientHelloMsg):
            if not hmac.compare_digest(message.token.encode(), self._token.encode()):
                raise m.BadFrame(m.BadFrameReason.wrong_token, type(message).__name__)
            return
        is_request = isinstance(message, m.RequestMsg)
        if is_request and identity in self._clients:
            self._clients.move_to_end(identity)
        is_known = identity in self._clients if is_request else self.agent(identity) is not None
        if not is_known:
            raise m.BadFrame(m.BadFrameReason.no_hello, type(message).__name__)

    def _count(self, error: m.BadFrame) -> None:
        reason = error.reason.value
        self.num_dropped[reason] += 1
        if self.num_dropped[reason] == 1:
            logger.warning("dropped a frame: %s (more of this kind are counted only)", error)
