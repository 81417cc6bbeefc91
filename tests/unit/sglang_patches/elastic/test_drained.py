"""What counts as a request left."""

from collections import deque

import pytest
from elastic_fakes import Batch, Scheduler

from sglang_patches.elastic.drained import finish_idle_passes, is_drained

BUSY = Batch(1)
IDLE_PASS = Batch(1, is_idle=True)


def test_a_rank_without_anything_is_drained() -> None:
    assert is_drained(Scheduler())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("running_batch", BUSY),
        ("chunked_req", object()),
        ("waiting_queue", [object()]),
        ("_deferred_input_requests", [object()]),
        ("last_batch", BUSY),
        ("result_queue", deque([(IDLE_PASS, "idle"), (BUSY, "busy")])),
    ],
)
def test_anything_of_a_request_keeps_it(name: str, value: object) -> None:
    scheduler = Scheduler()
    setattr(scheduler, name, value)
    assert not is_drained(scheduler)


def test_a_request_whose_grammar_is_compiled_keeps_it() -> None:
    scheduler = Scheduler()
    scheduler.grammar_manager.grammar_queue.append(object())
    assert not is_drained(scheduler)


def test_idle_passes_in_flight_are_no_request() -> None:
    scheduler = Scheduler()
    scheduler.last_batch = IDLE_PASS
    scheduler.result_queue.append((IDLE_PASS, "idle"))
    assert is_drained(scheduler)


def test_a_scheduler_without_overlap_has_no_results_in_flight() -> None:
    scheduler = Scheduler()
    del scheduler.result_queue
    assert is_drained(scheduler)
    finish_idle_passes(scheduler)
    assert scheduler.journal == []


def test_idle_passes_are_taken_in_oldest_first_and_forgotten() -> None:
    scheduler = Scheduler()
    scheduler.last_batch = IDLE_PASS
    scheduler.result_queue.extend([(IDLE_PASS, "first"), (IDLE_PASS, "second")])
    finish_idle_passes(scheduler)
    assert scheduler.journal == ["take in first", "take in second"]
    assert not scheduler.result_queue
    assert scheduler.last_batch is scheduler.cur_batch_for_debug is None
