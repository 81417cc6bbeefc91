"""What the server's main process does for a lost rank: its requests end, with the tokens that have come.

    AbandonRank -> every request of that rank ends as aborted, at its client
    a request that names a lost rank later -> the same, at once
    a control call that the lost rank had to answer -> waits a little for the others, then fails

Everything here runs on the tokenizer manager's event loop.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

CALL_GRACE_S = 30.0
"""How long the other ranks may take to answer a call that a lost rank was part of."""

T = TypeVar("T")


class RankLostInCall(RuntimeError):
    """A rank was lost while a control call was out."""


class Losses:
    """The lost ranks of one server."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._turn = itertools.count()
        self._lost: set[int] = set()
        self._waiting: set[asyncio.Event] = set()

    def choose(self, routed: Sequence[int], load: Mapping[int, int] | None) -> int | None:
        """Whom a request goes to that names no rank: here, since its rank must be known where it is ended.

        `load`: of each rank that has any, where the least loaded one is wanted; else they take turns.
        """
        if not routed:
            return None
        turn = next(self._turn) % len(routed)
        if load is None:
            return routed[turn]
        return min((*routed[turn:], *routed[:turn]), key=lambda rank: load.get(rank, 0))

    def refuse(self, request_id: str, dp_rank: int | None) -> None:
        """A request is on its way to a rank that may be lost."""
        if dp_rank in self._lost:
            # After SGLang has sent it, into the void.
            asyncio.get_running_loop().call_soon(self._end, request_id, dp_rank)

    def abandon(self, ep_rank: int, request_ids: Iterable[str]) -> None:
        """The rank is lost, and these are its requests."""
        self._lost.add(ep_rank)
        found = list(request_ids)
        logger.warning("flexfloor dp_rank=%d lost, num_requests_aborted=%d", ep_rank, len(found))
        for request_id in found:
            self._end(request_id, ep_rank)
        for waiting in self._waiting:
            waiting.set()

    async def answered(self, call: Awaitable[T], name: str) -> T:
        """What the call gives. Raises RankLostInCall where a rank was lost and answers are missing."""
        lost = asyncio.Event()
        self._waiting.add(lost)
        task = asyncio.ensure_future(call)
        watch = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=CALL_GRACE_S)
            if not task.done():
                raise RankLostInCall(f"flexfloor: a rank was lost while {name} was out. Fix: call again.")
            return task.result()
        finally:
            self._waiting.discard(lost)
            watch.cancel()
            task.cancel()

    def _end(self, request_id: str, dp_rank: int) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        manager = self._tokenizer_manager
        state = manager.rid_to_state.get(request_id)
        if state is None:
            return
        # Without a status code the client gets an answer, with the tokens so far, and not an HTTP error.
        reason = {"type": "abort", "message": f"flexfloor: dp rank {dp_rank} lost"}
        manager._handle_abort_req(AbortReq(rid=request_id, finished_reason=reason))
        if state.out_list and getattr(state.obj, "stream", False) and manager.incremental_streaming_output:
            _without_repeats(state)


def _without_repeats(state: Any) -> None:
    """SGLang repeats the last token, and all logprobs, in the chunk that ends an aborted stream."""
    from sglang.srt.managers.tokenizer_manager import _slice_streaming_output_meta_info

    chunk = state.out_list[-1]
    chunk["output_ids"] = []
    _slice_streaming_output_meta_info(chunk["meta_info"], len(state.output_ids))
