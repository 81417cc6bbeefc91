"""What the rest of a rollout step is expected to look like, rank by rank. PURE.

The future is cut into cells of decode iterations, short ones first. In each cell every response is still
there with some probability, given what it has generated already; from these follow the expected load of a
rank, the chance that it has drained, and the chance that the step is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from flexfloor.scheduling.decision import GroupView, RunningResponse
from flexfloor.scheduling.loads import Floats, Loads

_NUM_CELLS = 20
_FIRST_CELL_SHARE = 1 / 800
"""Of the longest possible rest."""
_TAIL_SHARE = 0.05
_TAIL_EXPONENT = 4.33
"""A scale-free tail from one standard deviation above the mean; its mean rest is 0.3 of what there is, as in
`LengthPrediction.remaining_tokens`. Without it a response beyond its log-normal would seem to end at once."""
_LEAST_CHANCE = 1e-6
_OF_RESPONSE = ("generated_tokens", "prompt_tokens", "is_queued")
_OF_PREDICTION = ("mean_log", "sd_log", "cap_share", "cap_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Of n responses over k cells. All but `members` is about the view as it is, before any order."""

    responses: tuple[RunningResponse, ...]
    rank_of: NDArray[np.int64]
    """[n], ascending."""
    contexts: Floats
    """[n] context tokens now; 0 for a queued one."""
    starts: Floats
    """[k] decode iterations from now to where a cell begins."""
    widths: Floats
    """[k]"""
    alive: Floats
    """[n, k] probability of still running in the middle of the cell."""
    context: Floats
    """[n, k] expected context tokens there."""
    log_done: Floats
    """[n, k] ln of the probability of having ended."""
    variance: Floats
    """[k] of the number of responses that still run."""
    runs_on: Floats
    """[k] probability that the step is not over."""
    longest_tokens: float
    """Of prompt and response, where one ran to its cap."""

    @property
    def num_cells(self) -> int:
        return int(self.widths.shape[0])

    @property
    def rest_tokens(self) -> Floats:
        """[n] expected tokens to come."""
        return np.asarray(self.alive @ self.widths, dtype=np.float64)

    @property
    def longest_rest_tokens(self) -> float:
        """Where the last cell ends."""
        return float(self.starts[-1] + self.widths[-1])

    def cell_of(self, chance: float) -> int:
        """The last cell in which the step runs on with at least this probability."""
        return max(0, int((self.runs_on >= chance).sum()) - 1)


def make_outlook(view: GroupView) -> Outlook:
    """At least one response runs or is queued. A queued one is taken to run from now on."""
    responses = tuple(response for on_rank in view.responses for response in on_rank)
    counts = [len(on_rank) for on_rank in view.responses]
    # A column at a time: thousands of rows of objects would take most of a decision's time.
    generated, prompt, is_queued = (_column(responses, name) for name in _OF_RESPONSE)
    predictions = [response.prediction for response in responses]
    mean_log, sd_log, cap_share, cap = (_column(predictions, name) for name in _OF_PREDICTION)
    total = generated + prompt
    rest = np.maximum(cap - generated, 1.0)
    edges = np.concatenate(
        [[0.0], np.geomspace(max(1.0, rest.max() * _FIRST_CELL_SHARE), max(2.0, rest.max()), _NUM_CELLS)]
    )
    middles = (edges[:-1] + edges[1:]) / 2
    alive = _alive(generated, middles, mean_log, np.maximum(sd_log, 1e-3), cap_share, rest)
    log_done = np.log1p(-np.minimum(alive, 1 - 1e-12))
    return Outlook(
        responses=responses,
        rank_of=np.repeat(np.arange(view.num_ranks), counts),
        contexts=total * (1.0 - is_queued),
        starts=edges[:-1],
        widths=np.diff(edges),
        alive=alive,
        context=alive * (total[:, None] + middles),
        log_done=log_done,
        variance=np.einsum("nk,nk->k", alive, 1 - alive),
        runs_on=np.maximum(-np.expm1(log_done.sum(axis=0)), _LEAST_CHANCE),
        longest_tokens=float((prompt + cap).max()),
    )


def _column(rows: Sequence[object], name: str) -> Floats:
    return np.fromiter(map(attrgetter(name), rows), dtype=np.float64, count=len(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSums:
    """The outlook summed over the responses of each rank; arrays are [num_ranks, k]."""

    count: Floats
    context: Floats
    log_done: Floats

    @classmethod
    def of(cls, outlook: Outlook, num_ranks: int) -> "RankSums":
        occupied, starts = np.unique(outlook.rank_of, return_index=True)
        sums = []
        for values in (outlook.alive, outlook.context, outlook.log_done):
            by_rank = np.zeros((num_ranks, outlook.num_cells))
            by_rank[occupied] = np.add.reduceat(values, starts, axis=0)
            sums.append(by_rank)
        return cls(count=sums[0], context=sums[1], log_done=sums[2])

    def moved(self, outlook: Outlook, movers: Sequence[int], targets: Sequence[int]) -> "RankSums":
        """With responses `movers` (positions in the outlook) on ranks `targets`."""
        if not movers:
            return self
        chosen, to = np.array(movers), np.array(targets)
        sums = []
        for before, values in (
            (self.count, outlook.alive),
            (self.context, outlook.context),
            (self.log_done, outlook.log_done),
        ):
            after, part = before.copy(), values[chosen]
            np.subtract.at(after, outlook.rank_of[chosen], part)
            np.add.at(after, to, part)
            sums.append(after)
        return RankSums(count=sums[0], context=sums[1], log_done=sums[2])

    def busy(self) -> Floats:
        """[num_ranks, k] probability that a rank still has a response."""
        return np.asarray(-np.expm1(np.minimum(self.log_done, 0.0)), dtype=np.float64)


def loads(outlook: Outlook, sums: RankSums, num_members: Floats) -> Loads:
    """[k] expected loads, given that the step runs on, with `num_members` [k].

    The fullest rank has more than the largest expectation: which responses end is chance, and the largest of
    m counts lies about sqrt(2 ln m) standard deviations above.
    """
    total = np.maximum(1.0, sums.count.sum(axis=0) / outlook.runs_on)
    most = np.maximum(sums.count.max(axis=0), 1e-9)
    variance = outlook.variance / num_members
    fullest = most + np.sqrt(2 * np.log(np.maximum(1.0, num_members)) * variance)
    fullest = np.clip(fullest / outlook.runs_on, 1.0, total)
    return Loads(
        num_ranks=num_members,
        num_running=total,
        max_running=fullest,
        max_context_tokens=sums.context.max(axis=0) * fullest / most,
    )


def _alive(
    generated: Floats, middles: Floats, mean_log: Floats, sd_log: Floats, cap_share: Floats, rest: Floats
) -> Floats:
    """[n, k] P(length > generated + middle | length > generated), 0 from the cap on."""
    points = np.concatenate([generated[:, None], generated[:, None] + middles], axis=1)
    logs = np.log(np.maximum(points, 0.5))
    deviations = (logs - mean_log[:, None]) / sd_log[:, None]
    tail = np.exp(-_TAIL_EXPONENT * np.maximum(0.0, (deviations - 1) * sd_log[:, None]))
    body = (1 - _TAIL_SHARE) * _normal_above(deviations) + _TAIL_SHARE * tail
    longer = cap_share[:, None] + (1 - cap_share[:, None]) * body
    share = longer[:, 1:] / np.maximum(longer[:, :1], 1e-300)
    return np.where(middles < rest[:, None], np.minimum(share, 1.0), 0.0)


def _normal_above(deviations: Floats) -> Floats:
    """1 - Phi, to 1e-7 (Abramowitz and Stegun 7.1.26); numpy has no error function."""
    size = np.abs(deviations) / np.sqrt(2.0)
    t = 1 / (1 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    above = 0.5 * series * np.exp(-(size**2))
    return np.where(deviations >= 0, above, 1 - above)
