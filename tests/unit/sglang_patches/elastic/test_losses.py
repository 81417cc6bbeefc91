"""The main process's part in a loss: placing requests, ending a lost rank's, calls that wait for it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from elastic_fakes import stand_in

from sglang_patches.elastic import losses
from sglang_patches.elastic.losses import Losses, RankLostInCall


class Manager:
    """SGLang's TokenizerManager, which repeats the last token when it ends a stream."""

    def __init__(self) -> None:
        self.incremental_streaming_output = True
        self.rid_to_state: dict[str, Any] = {}

    def add(self, request_id: str, *tokens: int, stream: bool = True) -> Any:
        state = SimpleNamespace(output_ids=list(tokens), out_list=[], obj=SimpleNamespace(stream=stream))
        self.rid_to_state[request_id] = state
        return state

    def _handle_abort_req(self, message: Any) -> None:
        state = self.rid_to_state.pop(message.rid)
        meta = {"finish_reason": message.finished_reason, "output_token_logprobs": list(state.output_ids)}
        state.out_list.append({"output_ids": state.output_ids[-1:], "meta_info": meta})


def cut(meta: dict[str, Any], offset: int) -> None:
    meta["output_token_logprobs"] = meta["output_token_logprobs"][offset:]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    stand_in(monkeypatch, "sglang.srt.managers.io_struct", AbortReq=SimpleNamespace)
    stand_in(monkeypatch, "sglang.srt.managers.tokenizer_manager", _slice_streaming_output_meta_info=cut)
    return Manager()


def test_requests_without_a_rank_take_turns_or_go_to_the_least_loaded(manager: Manager) -> None:
    lost = Losses(manager)
    assert [lost.choose((0, 2, 3), None) for _ in range(4)] == [0, 2, 3, 0]
    assert lost.choose((0, 2, 3), {0: 5, 2: 1, 3: 4}) == 2
    assert {lost.choose((0, 2, 3), {0: 5}) for _ in range(4)} == {2, 3}
    assert lost.choose((), None) is None


def test_a_lost_ranks_requests_end_with_the_reason_and_repeat_nothing(manager: Manager) -> None:
    states = [manager.add("a", 7, 8), manager.add("b"), manager.add("c", 5)]
    Losses(manager).abandon(2, ["a", "b", "gone"])
    assert list(manager.rid_to_state) == ["c"]
    reason = {"type": "abort", "message": "flexfloor: dp rank 2 lost"}
    for state in states[:2]:
        (chunk,) = state.out_list
        assert chunk["output_ids"] == []
        assert chunk["meta_info"] == {"finish_reason": reason, "output_token_logprobs": []}
    assert states[2].out_list == []


def test_a_request_that_is_not_streamed_gets_all_its_tokens(manager: Manager) -> None:
    state = manager.add("a", 7, stream=False)
    Losses(manager).abandon(2, ["a"])
    assert state.out_list[0]["meta_info"]["output_token_logprobs"] == [7]


def test_a_request_for_a_rank_that_is_lost_already_ends_after_it_was_sent(manager: Manager) -> None:
    async def send() -> list[str]:
        lost = Losses(manager)
        lost.abandon(2, [])
        for request_id, rank in (("a", 2), ("b", 1)):
            manager.add(request_id)
            lost.refuse(request_id, rank)
        assert list(manager.rid_to_state) == ["a", "b"]
        await asyncio.sleep(0)
        return list(manager.rid_to_state)

    assert asyncio.run(send()) == ["b"]


def test_a_call_that_waits_for_a_lost_rank_fails_and_says_so(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CALL_GRACE_S", 0.01)

    async def call() -> None:
        lost = Losses(manager)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lost.abandon, 2, [])
        await lost.answered(answer, "FlushCacheReqInput")

    with pytest.raises(RankLostInCall, match="FlushCacheReqInput"):
        asyncio.run(call())


def test_a_call_that_is_answered_all_the_same_gives_its_answer(manager: Manager) -> None:
    async def call() -> int:
        lost = Losses(manager)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        loop.call_soon(lost.abandon, 2, [])
        loop.call_later(0.01, answer.set_result, 5)
        return await lost.answered(answer, "FlushCacheReqInput")

    assert asyncio.run(call()) == 5
