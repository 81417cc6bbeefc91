"""The standard comparison: a static group, each lever, the release profiles, and smaller groups. PURE.

Tokens per occupied worker-second alone reward any smaller group, so smaller static groups are always part of
the table, and sizes are compared by one price of wall time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flexfloor.config.choices import Batching, Placement, StartingSize
from flexfloor.scheduling.release import DRAINED, EAGER, GUARDED, MAX
from flexfloor.simulate.results import Ratios, ScenarioResult, smallest_at_least
from flexfloor.simulate.scenario import Machine, Scheme, Workload, run_scenario

STATIC = Scheme(name="static")
BUCKETED = Scheme(name="bucketed", batching=Batching.length_bucketed, placement=Placement.balanced)
DRAINED_RELEASE = replace(BUCKETED, name="drained release", release=DRAINED)
GUARDED_RELEASE = replace(BUCKETED, name="guarded", release=GUARDED)
EAGER_RELEASE = replace(BUCKETED, name="eager", release=EAGER)
MAX_RELEASE = replace(BUCKETED, name="max", release=MAX)
GUARDED_AUTO = replace(GUARDED_RELEASE, name="guarded, auto size", starting_size=StartingSize.auto)
ELASTIC = (DRAINED_RELEASE, GUARDED_RELEASE, EAGER_RELEASE, MAX_RELEASE)

_EIGHTHS = (8, 7, 6, 5, 4, 3, 2)


def sized(scheme: Scheme, num_ranks: int) -> Scheme:
    """The same on a smaller group."""
    return replace(scheme, num_ranks=num_ranks)


def sizes(num_ranks: int, floor: int) -> tuple[int, ...]:
    """Group sizes to compare, eighths of the full one, largest first."""
    found = {num_ranks * part // 8 for part in _EIGHTHS} | {num_ranks}
    return tuple(sorted((size for size in found if size >= floor), reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Runs over the same responses, the static group first."""

    num_ranks: int
    price: float
    runs: tuple[ScenarioResult, ...]
    guarded_by_size: tuple[ScenarioResult, ...]
    """The guarded profile on every size, largest first."""

    @property
    def static(self) -> ScenarioResult:
        return self.runs[0]

    def ratios(self, run: ScenarioResult) -> Ratios:
        return Ratios.of(run, self.static)

    @property
    def fewest(self) -> ScenarioResult | None:
        """The smallest guarded group that is as fast as the static one."""
        return smallest_at_least(self.guarded_by_size, self.static.tokens_per_s)

    @property
    def recommended(self) -> ScenarioResult:
        """The size that costs least when wall time has `price`, as everywhere else."""
        return min(self.guarded_by_size, key=lambda run: run.objective(self.price, self.num_ranks))


def run_study(
    workload: Workload,
    machine: Machine,
    *,
    window_steps: int,
    price: float,
    advance: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Study:
    """`advance` is told how many runs of how many are done, and the name of the next."""
    half = machine.num_ranks // 2
    schemes = [STATIC, BUCKETED, *ELASTIC, GUARDED_AUTO]
    schemes += [sized(scheme, half) for scheme in (STATIC, BUCKETED) if half >= 1]
    smaller = [size for size in sizes(machine.num_ranks, machine.floor) if size < machine.num_ranks]
    by_size = [sized(GUARDED_RELEASE, size) for size in smaller]
    results = []
    total = len(schemes) + len(by_size)
    for done, scheme in enumerate([*schemes, *by_size]):
        advance(done, total, scheme.name)
        results.append(run_scenario(workload, replace(scheme, window_steps=window_steps), machine))
    advance(total, total, "")
    runs = results[: len(schemes)]
    guarded = runs[schemes.index(GUARDED_RELEASE)]
    return Study(
        num_ranks=machine.num_ranks,
        price=price,
        runs=tuple(runs),
        guarded_by_size=(guarded, *results[len(schemes) :]),
    )


def best_static_gain(run: ScenarioResult, static_sizes: Sequence[ScenarioResult]) -> float:
    """Tokens per occupied worker time against the smallest static group that is at least as fast.

    Where none is, not even the full one, against the fastest of them.
    """
    rival = smallest_at_least(static_sizes, run.tokens_per_s)
    rival = rival or max(static_sizes, key=lambda one: one.tokens_per_s)
    return run.tokens_per_occupied_s / rival.tokens_per_occupied_s
