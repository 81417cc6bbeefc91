"""Which requests run, and how many tokens they have brought."""

from types import SimpleNamespace

from sglang_patches.release.tracker import RequestTracker, SentRequest


def sent(name: str, num_tokens: int = 0, dp_rank: int | None = 0) -> SentRequest:
    state = SimpleNamespace(output_ids=[7] * num_tokens)
    return SentRequest(request_id=name, dp_rank=dp_rank, prompt_tokens=3, cap_tokens=9, state=state)


def test_what_is_no_longer_in_sglangs_table_is_over_once() -> None:
    tracker, a, b = RequestTracker(), sent("a"), sent("b")
    for request in (a, b):
        tracker.send(request)
    assert tracker.settle({"a": a.state, "b": b.state}) == []
    assert tracker.settle({"b": b.state}) == [a]
    assert tracker.settle({"b": b.state}) == []
    assert list(tracker) == [b]


def test_tokens_of_running_and_finished_requests_count() -> None:
    tracker, a, b = RequestTracker(), sent("a", 5), sent("b", 2)
    for request in (a, b):
        tracker.send(request)
    assert tracker.num_tokens == 7
    b.state.output_ids += [7, 7]
    tracker.settle({"b": b.state})
    assert tracker.num_tokens == 9
    assert len(tracker) == 1


def test_an_id_that_is_used_again_is_another_request() -> None:
    tracker, first, second = RequestTracker(), sent("a", 4), sent("a", 1)
    tracker.send(first)
    tracker.send(second)
    assert tracker.settle({"a": second.state}) == [first]
    assert tracker.num_tokens == 5
    # The same id and another request of SGLang's: the one that was sent is over.
    assert tracker.settle({"a": object()}) == [second]
