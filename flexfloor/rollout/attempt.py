"""One attempt to draw a response on a rank, and how it is ended early."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from flexfloor.errors import FlexfloorError
from flexfloor.rollout.engine import Engine
from flexfloor.rollout.silence import SilenceWatch
from flexfloor.rollout.step_state import ResponseState
from flexfloor.types import ResponseRequest

_ABORT_AGAIN_S = 0.25


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    request: ResponseRequest
    dp_rank: int
    number: int
    known: ResponseState
    watch: SilenceWatch | None = None
    """Set when the stream opens."""
    moves_to: int | None = None
    """A move to this rank is under way."""
    is_moved: bool = False
    """The move's abort has ended it."""
    is_rank_gone: bool = False
    """Its rank's death has ended it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_begun(self) -> bool:
        """Something of it has arrived."""
        return self.watch is not None and self.watch.has_begun

    async def abort(self, engine: Engine) -> None:
        """Abort it until it has ended, again and again: an abort that overtakes its request is forgotten."""
        pause_s = _ABORT_AGAIN_S
        while not self.ended.is_set():
            with contextlib.suppress(FlexfloorError, TimeoutError):
                await engine.abort(self.request.response_id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), pause_s)
            pause_s *= 2
