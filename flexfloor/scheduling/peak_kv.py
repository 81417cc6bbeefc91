"""When responses of sampled lengths run on their ranks, and the KV tokens that this needs at most. PURE.

Time is counted in decode iterations: a running response makes one token in each, on whatever rank. Prefill,
shared prefixes and retraction are left out, so a peak is that of an engine that never runs out of room.

Arrays by response are in the order of the queues, that is of submission.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexfloor.scheduling.lengths import LengthPrediction

Tokens = NDArray[np.int64]


def sample_lengths(
    predictions: Sequence[LengthPrediction], *, num_scenarios: int, rng: np.random.Generator
) -> Tokens:
    """Draws of every response's length, [num_scenarios, num_responses], each from 1 to its cap.

    Draws are independent: what siblings share (the error of their prompt's estimate) averages out over the
    prompts of a rank.
    """
    mean_log = np.array([prediction.mean_log for prediction in predictions])
    sd_log = np.array([prediction.sd_log for prediction in predictions])
    cap_share = np.array([prediction.cap_share for prediction in predictions])
    caps = np.array([prediction.cap_tokens for prediction in predictions], dtype=np.int64)
    shape = (num_scenarios, len(predictions))
    # Capped before exp, which would overflow on a wild prediction.
    logs = np.minimum(mean_log + sd_log * rng.standard_normal(shape), np.log(np.maximum(caps, 1)))
    lengths = np.clip(np.rint(np.exp(logs)), 1, np.maximum(caps, 1)).astype(np.int64)
    return np.where(rng.random(shape) < cap_share, caps, lengths)


def start_iterations(lengths: Tokens, ranks: Tokens, *, num_ranks: int, running_limit: int | None) -> Tokens:
    """When each response begins to run, like `lengths` [num_scenarios, num_responses].

    `ranks` [num_responses]. A rank runs up to `running_limit` responses; the others wait in their order and
    each takes the first place that becomes free.
    """
    starts = np.zeros_like(lengths)
    counts = np.bincount(ranks, minlength=num_ranks)
    longest_queue = int(counts.max(initial=0))
    if running_limit is None or longest_queue <= running_limit:
        return starts
    by_rank = np.argsort(ranks, kind="stable")
    position = np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)
    # [num_scenarios, num_ranks, longest_queue]; a place that no response takes costs no time.
    queued = np.zeros((lengths.shape[0], num_ranks, longest_queue), dtype=np.int64)
    queued[:, ranks[by_rank], position] = lengths[:, by_rank]
    begins = np.zeros_like(queued)
    free_at = queued[:, :, :running_limit].copy()
    for index in range(running_limit, longest_queue):
        place = free_at.argmin(axis=2)[:, :, None]
        begin = np.take_along_axis(free_at, place, axis=2)
        begins[:, :, index] = begin[:, :, 0]
        np.put_along_axis(free_at, place, begin + queued[:, :, index : index + 1], axis=2)
    starts[:, by_rank] = begins[:, ranks[by_rank], position]
    return starts


def peak_kv_tokens(
    lengths: Tokens, starts: Tokens, *, prompt_tokens: Tokens, ranks: Tokens, num_ranks: int
) -> Tokens:
    """Most KV tokens that each rank holds at once, [num_scenarios, num_ranks].

    `lengths` and `starts` [num_scenarios, num_responses]; `prompt_tokens` and `ranks` [num_responses]. A
    rank's need grows with every iteration and falls only where a response ends, so the peak is at an end.
    """
    num_scenarios, num_responses = lengths.shape
    peaks = np.zeros(num_scenarios * num_ranks, dtype=np.int64)
    if num_responses == 0:
        return peaks.reshape(num_scenarios, num_ranks)
    lane = np.arange(num_scenarios)[:, None] * num_ranks + ranks
    ends, base = starts + lengths, prompt_tokens - starts
    horizon = int(ends.max()) + 1
    # Sorted by scenario and rank, then time; an end comes before the start that takes its place.
    key_end = (lane * horizon + ends) * 2
    key_start = (lane * horizon + starts) * 2 + 1
    keys = np.concatenate([key_end.ravel(), key_start.ravel()])
    order = np.argsort(keys)
    is_end = order < lengths.size
    which = np.where(is_end, order, order - lengths.size)
    sign = np.where(is_end, -1, 1)
    # At time t a rank holds sum(prompt - start) + t * running; each lane's sums end at 0, so one pass does.
    base_after, running_after = np.cumsum(sign * base.ravel()[which]), np.cumsum(sign)
    at_ends = np.flatnonzero(is_end)
    which = which[at_ends]
    time = ends.ravel()[which]
    held = (base_after[at_ends] + base.ravel()[which]) + time * (running_after[at_ends] + 1)
    lanes = lane.ravel()[which]
    first = np.flatnonzero(np.diff(lanes, prepend=-1))
    peaks[lanes[first]] = np.maximum.reduceat(held, first)
    return peaks.reshape(num_scenarios, num_ranks)
