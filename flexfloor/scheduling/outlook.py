"""What the rest of a rollout step is expected to look like, rank by rank. PURE.

The future is cut into cells of decode iterations, short ones first. In each cell every response is still
there with some probability, given what it has generated already; from these follow the expected load of a
rank, the chance that it has drained, and the chance that the step is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
_SERIES = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


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
    terms: Floats
    """[n, 3, k] for the middle of each cell: `alive`, `context`, `log_done`."""
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
    def alive(self) -> Floats:
        """[n, k] probability of still running."""
        return self.terms[:, 0]

    @property
    def context(self) -> Floats:
        """[n, k] expected context tokens."""
        return self.terms[:, 1]

    @property
    def log_done(self) -> Floats:
        """[n, k] ln of the probability of having ended."""
        return self.terms[:, 2]

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
    responses = tuple(chain.from_iterable(view.responses))
    kinds, kind_of = _kinds(responses)
    ages = _floats([kind.generated_tokens for kind in kinds])
    prompts = _floats([kind.prompt_tokens for kind in kinds])
    caps = _floats([kind.prediction.cap_tokens for kind in kinds])
    rest = np.maximum(caps - ages, 1.0)
    edges = np.concatenate(
        [[0.0], np.geomspace(max(1.0, rest.max() * _FIRST_CELL_SHARE), max(2.0, rest.max()), _NUM_CELLS)]
    )
    middles = (edges[:-1] + edges[1:]) / 2
    alive = _alive(kinds, ages, middles, rest)
    log_done = np.log1p(-np.minimum(alive, 1 - 1e-12))
    contexts = ages + prompts
    terms = np.stack([alive, alive * (contexts[:, None] + middles), log_done], axis=1)
    num_each = np.bincount(kind_of).astype(np.float64)
    return Outlook(
        responses=responses,
        rank_of=np.repeat(np.arange(view.num_ranks), [len(on_rank) for on_rank in view.responses]),
        contexts=contexts[kind_of] * _floats([not response.is_queued for response in responses]),
        starts=edges[:-1],
        widths=np.diff(edges),
        terms=terms if len(kinds) == len(responses) else terms[kind_of],
        variance=num_each @ (alive * (1 - alive)),
        runs_on=np.maximum(-np.expm1(num_each @ log_done), _LEAST_CHANCE),
        longest_tokens=float((prompts + caps).max()),
    )


def _kinds(responses: Sequence[RunningResponse]) -> tuple[list[RunningResponse], NDArray[np.int64]]:
    """One of each prediction, prompt length and age, and which of them every response is like.

    Samples of a prompt share the first two, and what began together has the same age. A column at a time:
    thousands of rows of objects would take most of a decision's time.
    """
    keys = [(id(one.prediction), one.prompt_tokens, one.generated_tokens) for one in responses]
    kinds = dict(zip(keys, responses, strict=True))
    number = {key: index for index, key in enumerate(kinds)}
    return list(kinds.values()), np.fromiter(map(number.__getitem__, keys), dtype=np.int64, count=len(keys))


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class RankSums:
    """The outlook summed over the responses of each rank."""

    terms: Floats
    """[num_ranks, 3, k], as the outlook's."""

    @classmethod
    def of(cls, outlook: Outlook, num_ranks: int) -> "RankSums":
        terms = np.zeros((num_ranks, *outlook.terms.shape[1:]))
        # The rows lie in the order of their ranks: no need to sort them.
        starts = _starts(outlook.rank_of)
        terms[outlook.rank_of[starts]] = np.add.reduceat(outlook.terms, starts, axis=0)
        return cls(terms)

    @property
    def count(self) -> Floats:
        """[num_ranks, k]"""
        return self.terms[:, 0]

    @property
    def context(self) -> Floats:
        """[num_ranks, k]"""
        return self.terms[:, 1]

    @property
    def log_done(self) -> Floats:
        """[num_ranks, k]"""
        return self.terms[:, 2]

    def moved(self, outlook: Outlook, movers: Sequence[int], targets: Sequence[int]) -> "RankSums":
        """With responses `movers` (positions in the outlook) on ranks `targets`."""
        if not movers:
            return self
        chosen = np.array(movers)
        part, after = outlook.terms[chosen], self.terms.copy()
        for ranks, sign in ((outlook.rank_of[chosen], -1), (np.array(targets), 1)):
            changed, sums = summed(part, ranks)
            after[changed] += sign * sums
        return RankSums(after)

    def busy(self) -> Floats:
        """[num_ranks, k] probability that a rank still has a response."""
        return np.asarray(-np.expm1(np.minimum(self.log_done, 0.0)), dtype=np.float64)


def summed(values: Floats, groups: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats]:
    """The groups that occur, ascending, and the sums of `values` [n, ...] over each of them."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = _starts(ordered)
    return ordered[starts], np.add.reduceat(values[order], starts, axis=0)


def _starts(ascending: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each run of equal numbers begins."""
    return np.flatnonzero(np.concatenate([[True], ascending[1:] != ascending[:-1]]))


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


def _alive(kinds: Sequence[RunningResponse], ages: Floats, middles: Floats, rest: Floats) -> Floats:
    """[n, k] P(length > age + middle | length > age), 0 from the cap on."""
    predictions = [kind.prediction for kind in kinds]
    mean_log = _floats([one.mean_log for one in predictions])[:, None]
    sd_log = np.maximum(_floats([one.sd_log for one in predictions]), 1e-3)[:, None]
    cap_share = _floats([one.cap_share for one in predictions])[:, None]
    deviations = np.add.outer(ages, np.concatenate([[0.0], middles]))
    np.log(np.maximum(deviations, 0.5, out=deviations), out=deviations)
    deviations -= mean_log
    deviations /= sd_log
    longer = _normal_above(deviations)
    longer *= 1 - _TAIL_SHARE
    tail = np.maximum(0.0, (deviations - 1) * sd_log)
    tail *= -_TAIL_EXPONENT
    longer += _TAIL_SHARE * np.exp(tail, out=tail)
    longer *= 1 - cap_share
    longer += cap_share
    share = longer[:, 1:] / np.maximum(longer[:, :1], 1e-300)
    return np.where(middles < rest[:, None], np.minimum(share, 1.0), 0.0)


def _normal_above(deviations: Floats) -> Floats:
    """1 - Phi, to 1e-7 (Abramowitz and Stegun 7.1.26); numpy has no error function."""
    size = np.abs(deviations)
    size /= np.sqrt(2.0)
    t = 1 / (1 + 0.3275911 * size)
    series = np.full_like(t, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series *= t
        series += coefficient
    series *= t
    series *= 0.5
    size *= -size
    series *= np.exp(size, out=size)
    return np.where(deviations >= 0, series, 1 - series)
