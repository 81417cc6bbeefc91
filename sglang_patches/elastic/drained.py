"""Whether a rank has any request left. An overlapped idle pass in flight is none."""

from typing import Any


def is_drained(scheduler: Any) -> bool:
    """True when leaving now would lose nothing: no request runs, waits, or has results in flight."""
    return (
        scheduler.running_batch.is_empty()
        and scheduler.chunked_req is None
        and not scheduler.waiting_queue
        and not scheduler.grammar_manager.grammar_queue
        and not scheduler._deferred_input_requests
        and _is_without_requests(scheduler.last_batch)
        and all(_is_without_requests(batch) for batch, _ in getattr(scheduler, "result_queue", ()))
    )


def finish_idle_passes(scheduler: Any) -> None:
    """Take in the results of idle passes in flight, so that a rank that returns does not find them."""
    results = getattr(scheduler, "result_queue", ())
    while results:
        scheduler.process_batch_result(*results.popleft())
    scheduler.last_batch = None
    # SGLang's watchdog takes a batch that stays for a hang.
    scheduler.cur_batch_for_debug = None


def _is_without_requests(batch: Any) -> bool:
    return batch is None or batch.is_empty() or batch.forward_mode.is_idle()
