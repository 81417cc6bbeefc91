"""The cost model's word on drained ranks."""

import math
from types import SimpleNamespace

import pytest

from sglang_patches.release.tracker import SentRequest
from sglang_patches.release.weigh import CostWeigher, SeenLengths


def sent(name: str, dp_rank: int, num_tokens: int, cap_tokens: int = 4096) -> SentRequest:
    state = SimpleNamespace(output_ids=[7] * num_tokens)
    return SentRequest(
        request_id=name, dp_rank=dp_rank, prompt_tokens=100, cap_tokens=cap_tokens, state=state
    )


def test_lengths_are_learnt_from_what_was_answered() -> None:
    lengths = SeenLengths()
    assert lengths.prediction(800).mean_log == pytest.approx(math.log(100))
    for _ in range(1000):
        lengths.add(50, 800)
    found = lengths.prediction(800)
    assert found.mean_log == pytest.approx(math.log(50), abs=0.01)
    assert found.sd_log < 0.2
    assert found.cap_share < 0.001


def test_responses_that_ran_to_their_cap_are_counted_apart_and_aborts_not_at_all() -> None:
    lengths = SeenLengths()
    for num_tokens in (800, 800, 100, 0):
        lengths.add(num_tokens, 800)
    assert lengths.prediction(800).cap_share == pytest.approx(2.04 / 11)


def test_a_long_rest_is_worth_a_switch_and_a_short_one_is_not() -> None:
    for num_tokens, expected in ((10, (1, 2, 3)), (4095, ())):
        weigher = CostWeigher("h200", 4, 1)
        running = [sent("a", 0, num_tokens)]
        assert weigher.leavers((1, 2, 3), (0, 1, 2, 3), running, 1.0) == expected, weigher.last_reason
        assert weigher.last_reason


def test_it_is_asked_again_when_a_rank_drains_or_responses_have_grown() -> None:
    weigher = CostWeigher("h200", 4, 1)
    running = [sent("a", 0, 4090), sent("b", 1, 4090)]
    weigher.leavers((2,), (0, 1, 2, 3), running, 1.0)
    asked = []
    weigher._policy = SimpleNamespace(
        decide=lambda view: asked.append(view) or SimpleNamespace(reason="", leavers=())
    )  # type: ignore[assignment]
    weigher.leavers((2,), (0, 1, 2, 3), running, 1.0)
    assert asked == []
    weigher.leavers((2, 3), (0, 1, 2, 3), running, 1.0)
    running[0].state.output_ids += [7] * 16
    weigher.leavers((2, 3), (0, 1, 2, 3), running, 1.0)
    assert [len(view.responses[0]) for view in asked] == [1, 1]


def test_only_drained_ranks_leave() -> None:
    weigher = CostWeigher("neutral", 4, 1)
    running = [sent("a", 0, 1), sent("b", 2, 1)]
    assert weigher.leavers((1, 3), (0, 1, 2, 3), running, 0.0) == (1, 3)
    weigher.begin_step()
    assert weigher.leavers((1,), (0, 1, 2, 3), running, 0.0) == (1,)


def test_nothing_that_runs_is_no_reason_to_ask() -> None:
    assert CostWeigher("neutral", 4, 1).leavers((1,), (0, 1), [], 0.0) == ()
