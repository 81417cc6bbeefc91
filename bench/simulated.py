"""Simulated schedules on 8 to 256 workers: every lever, its limits, and its distance from what is possible.

    python bench/simulated.py [--quick] [--seeds 0 1] [--only A H ...] [--json-out FILE]

Priced with a model of H200 (and H100) that was not fitted to any GPU run. Every ratio is against a static
group with verl's placement over the same responses. Details go to stderr and to --json-out; the last line is
one JSON object. One core, about ten minutes; --quick under one.

Gains and what ends in `_min` are the lowest over regimes, each regime's number the median over seeds.
`oracle_fraction_min`: tokens per occupied worker time of the guarded profile, against the same policies over
the same batches, knowing every length when they place and release. `oracle_fraction_with_known_batches_min`:
against those that form batches by known lengths too. No prediction comes near that: which responses will run
away is chance, and the oracle puts them all into one step. `worst_throughput_ratio`: of the guarded profile,
over every case and seed. `wrong_clock_throughput_min`: of it with a wrong cost model, against the same
batches and releases without moving.

`gain_over_best_static_size`: guarded on all workers against the smallest bucketed static group that is at
least as fast, over the regimes with a tail idle of 0.15 and more. It flatters where only the full group is as
fast and a smaller one that is nearly so costs much less. So, for the same regimes,
`gain_at_matched_throughput`: for each bucketed static size that is above the floor and has 0.9 of the full
one's throughput, the best of ours of any size that is at least as fast, lowest over these sizes; 1 where none
of ours is. `gain_within_3_percent`: the same where ours may be slower by the share of wall time that the
guarded profile may give away.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scheduling_time import plans_s, release_decision_ms
from simulated_cases import MEMORY_CASES, QUICK_CASES, Setting, machine_of, sensitivities

from flexfloor.scheduling.release import GUARDED, ReleaseProfile
from flexfloor.simulate.bounds import free_migration_bound
from flexfloor.simulate.forecast import Knowledge
from flexfloor.simulate.results import Ratios, ScenarioResult
from flexfloor.simulate.scenario import Machine, Scheme, Workload, run_scenario
from flexfloor.simulate.study import (
    BUCKETED,
    DRAINED_RELEASE,
    EAGER_RELEASE,
    GUARDED_AUTO,
    GUARDED_RELEASE,
    MAX_RELEASE,
    STATIC,
    best_static_gain,
    sized,
    sizes,
)
from flexfloor.simulate.traces import REGIMES, Trace, generate

HISTORY_PASSES = 2
NUM_STEPS = 4
MANY = 1024
"""Responses of a step, from which on the first seed must do."""
RIVAL_SHARE = 0.9
"""Of the full static group's throughput that a smaller one must have to count."""
IDLE_ENOUGH = 0.15
MAIN = ("A", "B", "B0", "C", "D", "E", "F", "H", "J", "P1", "P2", "P3")
QUICK = ("A", "P1")
LAMBDAS = (0.0, 0.3, 1.0, 2.0, 4.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two small regimes, one seed")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--only", nargs="+", choices=list(REGIMES), help="these regimes, and no other cases")
    parser.add_argument("--json-out", type=Path)
    options = parser.parse_args()
    names = options.only or (QUICK if options.quick else MAIN)
    seeds = options.seeds or ([0] if options.quick else [0, 1])
    began_s = time.process_time()
    settings = QUICK_CASES if options.quick else (*MEMORY_CASES, *sensitivities("A"))
    bench = Bench(is_quick=options.quick, seeds=seeds)
    details = bench.run(names, () if options.only else settings)
    details["cpu_s"] = round(time.process_time() - began_s)
    if options.json_out:
        options.json_out.write_text(json.dumps(details, indent=1))
    print(json.dumps({"bench": "simulated", **details["summary"], "cpu_s": details["cpu_s"]}))


@dataclass(slots=True)
class Bench:
    is_quick: bool
    seeds: Sequence[int]

    def run(self, names: Sequence[str], settings: Sequence[Setting]) -> dict[str, Any]:
        main = {name: self._regime(name) for name in names}
        cases = {setting.name: self._guard(setting) for setting in settings}
        pareto = self._pareto("A") if settings else {}
        plans = plans_s()
        decision_ms = release_decision_ms()
        idle = {name: one for name, one in main.items() if one["idle"] >= IDLE_ENOUGH}
        wrong = {one.name: cases[one.name] for one in settings if one.truth is not None}
        return {
            "summary": {
                "oracle_fraction_min": lowest(main, "oracle_fraction"),
                "oracle_fraction_with_known_batches_min": lowest(main, "oracle_fraction_with_known_batches"),
                "worst_throughput_ratio": min(
                    ratio for one in (*main.values(), *cases.values()) for ratio in one["throughputs"]
                ),
                "wrong_clock_throughput_min": lowest(wrong, "throughput_without_moves"),
                "gain_over_best_static_size": lowest(idle, "gain_over_static"),
                "gain_at_matched_throughput": lowest(idle, "gain_at_matched_throughput"),
                "gain_within_3_percent": lowest(idle, "gain_within_3_percent"),
                "plan_16k_responses_256_workers_s": plans["16384 on 256"],
                "release_decision_ms": decision_ms,
                "release_decision_all_unlike_ms": release_decision_ms(samples_per_prompt=1),
                "seeds": len(self.seeds),
            },
            "regimes": main,
            "cases": cases,
            "pareto_over_lambda_A": pareto,
            "plan_s": plans,
        }

    def _regime(self, name: str) -> dict[str, Any]:
        began_s = time.process_time()
        seeds = self.seeds[:1] if REGIMES[name].num_responses >= MANY else self.seeds
        per_seed = [self._regime_at(name, seed) for seed in seeds]
        merged = merge(per_seed)
        merged["seeds"] = len(seeds)
        merged["cpu_s"] = round(time.process_time() - began_s)
        say(name, merged)
        return merged

    def _regime_at(self, name: str, seed: int) -> dict[str, Any]:
        setting = Setting(name=name, regime=name)
        run = self._runner(setting, seed)
        machine = machine_of(setting)
        static = run(STATIC)
        schemes = [BUCKETED, DRAINED_RELEASE, GUARDED_RELEASE]
        schemes += [] if self.is_quick else [GUARDED_AUTO, EAGER_RELEASE, MAX_RELEASE]
        runs = {scheme.name: run(scheme) for scheme in schemes}
        half = sized(STATIC, machine.num_ranks // 2)
        runs["static N/2"] = run(half)
        smaller = sizes(machine.num_ranks, machine.floor)[1:]
        by_size = [runs["bucketed"], *(run(sized(BUCKETED, size)) for size in smaller)]
        guarded = runs["guarded"]
        ours = [one for name, one in runs.items() if name not in ("bucketed", "static N/2")]
        guarded_by_size = [run(sized(GUARDED_RELEASE, size)) for size in smaller]
        ours += guarded_by_size
        oracle, in_step = (
            self._runner(replace(setting, knowledge=knowledge), seed)(GUARDED_RELEASE)
            for knowledge in (Knowledge.oracle, Knowledge.oracle_in_step)
        )
        rivals = [one for one in by_size if one.num_ranks > machine.floor]
        matched, near = (matched_gains(ours, rivals, share=share) for share in (1.0, 0.97))
        bound = bound_ratios(self._workload(setting, seed), machine, static)
        return {
            "idle": static.idle_share,
            "throughputs": [guarded.tokens_per_s / static.tokens_per_s],
            "slowest_step": slowest_step(guarded, runs["bucketed"]),
            "ratios": {
                scheme: ratio_list(one, static)
                for scheme, one in [*runs.items(), ("oracle", oracle), ("oracle in step", in_step)]
            }
            | {
                f"{one.scheme}, {one.num_ranks}": ratio_list(one, static)
                for one in [*by_size, guarded, *guarded_by_size]
            }
            | {"free migration": bound},
            "counts": {
                scheme: [one.num_switches, one.num_moves, one.num_retractions, one.num_refused]
                for scheme, one in runs.items()
            },
            "oracle_fraction": guarded.tokens_per_occupied_s / in_step.tokens_per_occupied_s,
            "oracle_fraction_with_known_batches": (
                guarded.tokens_per_occupied_s / oracle.tokens_per_occupied_s
            ),
            "oracle_cost_fraction": cost(oracle) / cost(guarded),
            "gain_over_static": best_static_gain(guarded, by_size),
            "gain_at_matched_throughput": min(matched.values()),
            "gain_within_3_percent": min(near.values()),
            "matched_gains_by_static_size": matched,
            "gains_within_3_percent_by_static_size": near,
            "gains_over_static": {
                scheme: best_static_gain(one, by_size)
                for scheme, one in runs.items()
                if "static" not in scheme
            },
        }

    def _guard(self, setting: Setting) -> dict[str, Any]:
        """Static, bucketed, drained release and guarded only."""
        per_seed = []
        for seed in self.seeds[:1]:
            run = self._runner(setting, seed)
            static, bucketed, guarded = run(STATIC), run(BUCKETED), run(GUARDED_RELEASE)
            drained = run(DRAINED_RELEASE)
            per_seed.append(
                {
                    "idle": static.idle_share,
                    "throughputs": [guarded.tokens_per_s / static.tokens_per_s],
                    "throughput_without_moves": guarded.tokens_per_s / drained.tokens_per_s,
                    "slowest_step": slowest_step(guarded, bucketed),
                    "ratios": {one.scheme: ratio_list(one, static) for one in (bucketed, drained, guarded)},
                    "counts": {
                        one.scheme: [one.num_switches, one.num_moves, one.num_retractions, one.num_refused]
                        for one in (static, bucketed, guarded)
                    },
                }
            )
        merged = merge(per_seed)
        say(setting.name, merged)
        return merged

    def _pareto(self, regime: str) -> dict[str, list[float]]:
        setting = Setting(name=regime, regime=regime)
        run = self._runner(setting, self.seeds[0])
        static, points = run(STATIC), {}
        for price in LAMBDAS[2:4] if self.is_quick else LAMBDAS:
            profile = ReleaseProfile(price=price, wall_budget=None)
            points[f"{price:g}"] = ratio_list(run(replace(GUARDED_RELEASE, release=profile)), static)
        say("lambda", points)
        return points

    def _runner(self, setting: Setting, seed: int) -> Callable[[Scheme], ScenarioResult]:
        workload, machine = self._workload(setting, seed), machine_of(setting)
        return lambda scheme: run_scenario(workload, scheme, machine)

    def _workload(self, setting: Setting, seed: int) -> Workload:
        regime = REGIMES[setting.regime].with_prompt_share(setting.prompt_share)
        trace = generate(regime, num_steps=NUM_STEPS, num_passes=HISTORY_PASSES + 1, seed=1000 + seed)
        return Workload(
            trace=trace,
            num_prompts_per_step=regime.num_prompts_per_step,
            num_history_passes=HISTORY_PASSES,
            knowledge=setting.knowledge,
            noise_sd=setting.noise_sd,
            seed=seed,
        )


def bound_ratios(workload: Workload, machine: Machine, static: ScenarioResult) -> list[float]:
    """Of the free-migration bound over batches that known lengths would make, priced as GUARDED is."""
    trace, size = workload.trace, workload.num_prompts_per_step
    wall_s = occupied_s = 0.0
    for lengths, prompts in sorted_batches(trace, workload.num_history_passes, size):
        bound = free_migration_bound(
            lengths,
            prompts,
            num_ranks=machine.num_ranks,
            floor=machine.floor,
            clock=machine.clock,
            price=GUARDED.price,
            kv_tokens=machine.kv_tokens,
        )
        wall_s, occupied_s = wall_s + bound.wall_s, occupied_s + bound.occupied_worker_s
    return [static.occupied_worker_s / occupied_s, static.wall_s / wall_s]


def sorted_batches(trace: Trace, first_pass: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    for lengths in trace.lengths[first_pass:]:
        order = np.argsort(lengths.mean(axis=1), kind="stable")
        for begin in range(0, trace.num_prompts, size):
            batch = order[begin : begin + size]
            prompts = np.repeat(trace.prompt_tokens[batch], trace.num_responses_per_prompt)
            yield lengths[batch].reshape(-1).tolist(), prompts.tolist()


def slowest_step(run: ScenarioResult, same_batches: ScenarioResult) -> float:
    """Longest wall time of a step against the static group's with the same prompts."""
    pairs = zip(run.steps, same_batches.steps, strict=True)
    return max(one.wall_s / other.wall_s for one, other in pairs if one.num_tokens == other.num_tokens)


def matched_gains(
    ours: Sequence[ScenarioResult], static_sizes: Sequence[ScenarioResult], *, share: float
) -> dict[str, float]:
    """By static size: the best of our runs that has a `share` of its throughput; 1 where none has.

    Static groups far slower than the full one, the first of them, are nobody's rival.
    """
    gains = {}
    for rival in static_sizes:
        if rival.tokens_per_s >= RIVAL_SHARE * static_sizes[0].tokens_per_s:
            fast = [one for one in ours if one.tokens_per_s >= share * rival.tokens_per_s]
            best = max((one.tokens_per_occupied_s for one in fast), default=rival.tokens_per_occupied_s)
            gains[str(rival.num_ranks)] = best / rival.tokens_per_occupied_s
    return gains


def cost(run: ScenarioResult) -> float:
    return run.objective(GUARDED.price, run.num_ranks)


def ratio_list(run: ScenarioResult, static: ScenarioResult) -> list[float]:
    """Tokens per occupied worker time, throughput, tokens per worker-iteration."""
    ratios = Ratios.of(run, static)
    return [ratios.occupied, ratios.throughput, ratios.worker_iterations]


def merge(per_seed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, number by number; what every seed says of throughput is kept."""
    merged: dict[str, Any] = {}
    for key, value in per_seed[0].items():
        # A static size may be a rival with one seed and too slow with another.
        values = [one[key] for one in per_seed if key in one]
        if key == "throughputs":
            merged[key] = [round(number, 3) for one in values for number in one]
        elif isinstance(value, dict):
            merged[key] = merge(values)
        elif isinstance(value, list):
            merged[key] = [round(statistics.median(each), 3) for each in zip(*values, strict=True)]
        else:
            merged[key] = round(statistics.median(values), 3)
    return merged


def lowest(found: dict[str, dict[str, Any]], key: str) -> float | None:
    return min((one[key] for one in found.values()), default=None)


def say(name: str, what: dict[str, Any]) -> None:
    print(name, json.dumps(what), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
