"""SGLang's stream events, cut anywhere, repeated or not, and what its errors mean."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.errors import StaleWeightsError
from flexfloor.rollout.engine import Chunk, EngineRefused, ResponseLost
from flexfloor.rollout.wire import stream_events, to_chunk, version_number
from flexfloor.types import FinishReason


def event(
    token_ids: list[int],
    total: int,
    finish: dict[str, Any] | None = None,
    entries: list[Any] | None = None,
    **meta: Any,
) -> bytes:
    """An event as SGLang writes it: `total` tokens so far, a logprob of -token/8 for each."""
    logprobs = [[-t / 8, t, None] for t in token_ids] if entries is None else entries
    meta_info = {
        "id": "x",
        "finish_reason": finish,
        "weight_version": "7",
        "num_retractions": 0,
        "output_token_logprobs": logprobs,
        "completion_tokens": total,
        "dp_rank": 1,
        **meta,
    }
    return b"data: " + json.dumps({"output_ids": token_ids, "meta_info": meta_info}).encode() + b"\n\n"


STOP = {"type": "stop", "matched": 2}
ABORT = {"type": "abort", "message": "paused", "status_code": None, "err_type": None}
DONE = b"data: [DONE]\n\n"


class Pieces:
    """The body of an answer as it arrives."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


def chunks_of(pieces: list[bytes], is_incremental: bool = True) -> list[Chunk]:
    async def read() -> list[Chunk]:
        chunks, num_seen = [], 0
        async for item in stream_events(Pieces(pieces)):
            chunks.append(to_chunk(item, num_seen, is_incremental))
            num_seen += len(chunks[-1].token_ids)
        return chunks

    return asyncio.run(read())


INCREMENTAL = event([8], 1) + event([9, 10], 3) + event([2], 4, STOP) + DONE
CUMULATIVE = event([8], 1) + event([8, 9, 10], 3) + event([8, 9, 10, 2], 4, STOP) + DONE
EXPECTED = [
    Chunk(token_ids=[8], logprobs=[-1.0], weight_version=7),
    Chunk(token_ids=[9, 10], logprobs=[-1.125, -1.25], weight_version=7),
    Chunk(token_ids=[2], logprobs=[-0.25], weight_version=7, finish_reason=FinishReason.stop),
]


@given(st.lists(st.integers(0, len(INCREMENTAL)), max_size=6))
def test_events_survive_any_cutting_into_pieces(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(INCREMENTAL)]
    pieces = [INCREMENTAL[a:b] for a, b in pairwise(bounds)]
    assert chunks_of(pieces) == EXPECTED


def test_cumulative_events_give_the_same_chunks() -> None:
    assert chunks_of([CUMULATIVE], is_incremental=False) == EXPECTED


def test_an_event_that_was_cut_off_is_not_used() -> None:
    for cut in range(len(INCREMENTAL) - len(DONE)):
        assert chunks_of([INCREMENTAL[:cut]]) == EXPECTED[: INCREMENTAL[:cut].count(b"\n\n")]


def test_an_abort_keeps_all_tokens_but_the_last_which_may_have_been_a_stop() -> None:
    *_, last = chunks_of([event([8], 1) + event([9, 11, 2], 4, ABORT)])
    assert (last.token_ids, last.logprobs) == ([9, 11], [-9 / 8, -11 / 8])
    assert (last.finish_reason, last.message) == (FinishReason.abort, "paused")


def test_an_abort_without_tokens_of_its_own_keeps_those_before() -> None:
    chunks = chunks_of([event([8], 1) + event([], 1, ABORT)])
    assert [chunk.token_ids for chunk in chunks] == [[8], []]
    cumulative = chunks_of([event([8], 1) + event([8, 9, 10], 3, ABORT)], is_incremental=False)
    assert [chunk.token_ids for chunk in cumulative] == [[8], [9]]


def test_the_abort_of_a_queued_request_repeats_a_token_that_is_not_taken_again() -> None:
    queued = event([8], 1, {"type": "abort", "message": "Abort in waiting queue"})
    *_, last = chunks_of([event([8], 1) + queued])
    assert (last.token_ids, last.logprobs, last.finish_reason) == ([], [], FinishReason.abort)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[-1.0, 8, None]], "2 tokens and 1 logprobs"),
        ([[-1.0, 8, None], [-1.0, 9, None], [-1.0, 3, None]], "2 tokens and 3 logprobs"),
        ([[-1.0, 8, None], [-1.0, 3, None]], r"token 9 came with logprob -1.0 of token 3"),
        ([[-1.0, 8, None], [None, 9, None]], r"token 9 came with logprob None"),
    ],
)
def test_tokens_need_their_own_logprobs(entries: list[Any], message: str) -> None:
    with pytest.raises(ResponseLost, match=message):
        chunks_of([event([8, 9], 2, entries=entries)])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EngineRefused),
        (404, EngineRefused),
        (408, ResponseLost),
        (429, ResponseLost),
        (503, ResponseLost),
    ],
)
def test_an_error_is_about_the_request_or_about_the_moment(status: int, kind: type[Exception]) -> None:
    by_event = b'data: {"error": {"message": "too bad", "code": %d}}\n\n' % status
    by_finish = event([], 0, {"type": "abort", "message": "too bad", "status_code": status})
    for body in (by_event, by_finish):
        with pytest.raises(kind, match=rf"\({status}\): too bad"):
            chunks_of([body])


@pytest.mark.parametrize("body", [b"data: {", b"data: []", b"data: {}", b'data: {"output_ids": "x"}'])
def test_nonsense_is_a_lost_answer(body: bytes) -> None:
    with pytest.raises(ResponseLost, match="event"):
        chunks_of([body + b"\n\n"])


def test_versions_are_numbers_and_one_per_response() -> None:
    span = {"start": 0, "end": 1}
    (same,) = chunks_of([event([8], 1, weight_versions=[{"version": "12", **span}])])
    assert same.weight_version == 12
    with pytest.raises(StaleWeightsError, match=r"changed within a response: versions \['7', '8'\]"):
        chunks_of([event([8], 1, weight_versions=[{"version": "7", **span}, {"version": "8", **span}])])
    with pytest.raises(StaleWeightsError, match="'default', not a number; start it with --weight-version"):
        version_number("default")
