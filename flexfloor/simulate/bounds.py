"""How little a step could cost if responses moved for nothing. PURE.

All responses of a step start together; at every age those that are left lie perfectly even on as many ranks
as are best at that age, and neither moving nor switching costs anything. The number of ranks minimises
(m + price x N) T(m): at price 0 no schedule can hold fewer worker-seconds under the same clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.loads import Loads, decode_many_s

_MOST_AGES = 400
"""Ages between which the number of responses left is taken as constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of the clock; a prefill counts as an iteration like others, as in lockstep it is one."""

    wall_s: float
    occupied_worker_s: float


def free_migration_bound(
    lengths: Sequence[int],
    prompt_tokens: Sequence[int],
    *,
    num_ranks: int,
    floor: int,
    clock: Clock,
    price: float,
    kv_tokens: Callable[[int], int | None] = lambda num_members: None,
) -> Bound:
    """Of one step with responses of these lengths, both [num_responses]."""
    ages, widths, alive, context = _by_age(np.array(lengths), np.array(prompt_tokens))
    sizes = np.arange(floor, num_ranks + 1)
    times = np.stack([_times(clock, size, alive, context) for size in sizes.tolist()])
    for row, size in enumerate(sizes.tolist()):
        pool = kv_tokens(size)
        if pool is not None and size < num_ranks:
            times[row, context / size > pool] = np.inf
    best = np.argmin((sizes[:, None] + price * num_ranks) * times, axis=0)
    chosen = widths * times[best, np.arange(len(ages))]
    return Bound(wall_s=float(chosen.sum()), occupied_worker_s=float((chosen * sizes[best]).sum()))


def _by_age(lengths: NDArray[np.int64], prompt_tokens: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    """Middle, width, responses left and their context tokens; [num_ages] each."""
    ends = np.unique(lengths)
    if len(ends) > _MOST_AGES:
        ends = np.unique(np.quantile(lengths, np.linspace(0, 1, _MOST_AGES), method="higher"))
    begins = np.concatenate(([0], ends[:-1]))
    middles = (begins + ends) / 2
    order = np.argsort(lengths)
    first = np.searchsorted(lengths[order], middles, side="left")
    prompts_left = np.concatenate((np.cumsum(prompt_tokens[order][::-1])[::-1], [0]))
    alive = (len(lengths) - first).astype(np.float64)
    return middles, (ends - begins).astype(np.float64), alive, prompts_left[first] + alive * middles


def _times(
    clock: Clock, size: int, alive: NDArray[np.float64], context: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[num_ages]; perfectly even: a rank may have a part of a response, but one at least has a whole one."""
    loads = Loads(
        num_ranks=np.full_like(alive, size),
        num_running=alive,
        max_running=np.maximum(1.0, alive / size),
        max_context_tokens=np.maximum(context / size, context / alive),
    )
    return decode_many_s(clock, loads)
