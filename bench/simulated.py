"""Simulated schedules on 8 to 256 workers: every lever, its limits, and its distance from what is possible.

    python bench/simulated.py [--quick] [--seeds 0 1] [--only A H ...] [--json-out FILE]

Priced with a model of H200 (and H100) that was not fitted to any GPU run. Every ratio is against a static
group with verl's placement over the same responses. Details go to stderr and to --json-out; the last line is
one JSON object. One core, about ten minutes; --quick under one.

`oracle_fraction_min`: tokens per occupied worker time of the guarded profile, against the same policies with
known lengths (batches, placement, release), lowest over the regimes, median over seeds. Beside it, the same
with batches left as they are. `worst_throughput_ratio`: of the guarded profile, over every case and seed.
`gain_over_best_static_size`: guarded against the smallest bucketed static group that is at least as fast,
lowest over the regimes with a tail idle of 0.15 and more.
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

from flexfloor.experts.memory import KvNeed, MemoryBudget, plan_size
from flexfloor.model_memory import ModelShape
from flexfloor.scheduling.clocks import H100, H200, GpuClock, GpuSpec
from flexfloor.scheduling.cost import Clock
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

QWEN3_30B_A3B = ModelShape(
    num_layers=48,
    num_experts=128,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_attention_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    dtype_bytes=2,
    kv_dtype_bytes=2,
)
GIB = 1024**3
MEMORY_BYTES = {"h200": 139 * GIB, "h100": 79 * GIB}
OTHER_BYTES = 8 * 10**9
HISTORY_PASSES = 2
NUM_STEPS = 4
MANY = 1024
"""Responses of a step, from which on the first seed must do."""
NEAR = 0.97
"""A static group of this share of our throughput counts as about as fast."""
IDLE_ENOUGH = 0.15
MAIN = ("A", "B", "B0", "C", "D", "E", "F", "H", "J", "P1", "P2", "P3")
QUICK = ("A", "P1")
LAMBDAS = (0.0, 0.3, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A regime on a machine, with what is known of it."""

    name: str
    regime: str
    spec: GpuSpec = H200
    memory: str = "h200"
    other_bytes: int = OTHER_BYTES
    truth: GpuSpec | None = None
    """What iterations really take; None: as the policies believe."""
    knowledge: Knowledge = Knowledge.history
    noise_sd: float = 0.0
    prompt_share: float = 0.55
    running_limit: int = 256
    set_sizes: tuple[int, ...] = ()
    """Member sets that are prepared, each the first ranks; none: any set."""


def sensitivities(regime: str) -> list[Setting]:
    """Wrong predictions, dear and free switches, a cost model that is wrong by a factor of two."""
    found = [
        Setting(name=f"{regime} noise {noise:g}", regime=regime, noise_sd=noise) for noise in (0.25, 0.5, 1.0)
    ]
    found.append(Setting(name=f"{regime} cold", regime=regime, knowledge=Knowledge.cold))
    found.append(Setting(name=f"{regime} reversed", regime=regime, knowledge=Knowledge.reversed))
    for stall_s in (0.0, 1.0, 3.0):
        spec = replace(H200, switch_fixed_s=stall_s, name=f"h200, switch {stall_s:g} s")
        found.append(Setting(name=f"{regime} switch {stall_s:g} s", regime=regime, spec=spec))
    for factor in (0.5, 2.0):
        truth = H200.scaled(fixed_s=factor, hop_s=factor)
        found.append(Setting(name=f"{regime} true overheads x {factor:g}", regime=regime, truth=truth))
        truth = H200.scaled(kv_efficiency=factor)
        found.append(Setting(name=f"{regime} true KV speed x {factor:g}", regime=regime, truth=truth))
    found.append(Setting(name=f"{regime} prompt share 0.8", regime=regime, prompt_share=0.8))
    num_ranks = REGIMES[regime].num_ranks
    for parts in ((4, 2), (6, 4, 3, 2)):
        set_sizes = tuple(num_ranks * part // 8 for part in parts)
        name = f"{regime} member sets of {', '.join(str(size) for size in set_sizes)} only"
        found.append(Setting(name=name, regime=regime, set_sizes=set_sizes))
    return found


MEMORY_CASES = (
    Setting(name="C on H100", regime="C", spec=H100, memory="h100"),
    Setting(name="C on H100, 25 GB taken", regime="C", spec=H100, memory="h100", other_bytes=25 * 10**9),
    Setting(name="D on H100, 32 running", regime="D", spec=H100, memory="h100", running_limit=32),
)

QUICK_CASES = (Setting(name="A noise 1", regime="A", noise_sd=1.0),)


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
        return {
            "summary": {
                "oracle_fraction_min": lowest(main, "oracle_fraction"),
                "oracle_in_step_fraction_min": lowest(main, "oracle_in_step_fraction"),
                "worst_throughput_ratio": min(
                    ratio for one in (*main.values(), *cases.values()) for ratio in one["throughputs"]
                ),
                "gain_over_best_static_size": lowest(
                    {name: one for name, one in main.items() if one["idle"] >= IDLE_ENOUGH},
                    "gain_over_static",
                ),
                "plan_16k_responses_256_workers_s": plans["16384 on 256"],
                "release_decision_ms": decision_ms,
                "seeds": len(self.seeds),
            },
            "gain_over_near_static": {name: one["gain_over_near_static"] for name, one in main.items()},
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
        if not self.is_quick:
            runs["guarded N/2"] = run(sized(GUARDED_RELEASE, machine.num_ranks // 2))
        half = sized(STATIC, machine.num_ranks // 2)
        runs["static N/2"] = run(half)
        by_size = [
            runs["bucketed"] if size == machine.num_ranks else run(sized(BUCKETED, size))
            for size in sizes(machine.num_ranks, machine.floor)
        ]
        guarded = runs["guarded"]
        oracle, in_step = (
            self._runner(replace(setting, knowledge=knowledge), seed)(GUARDED_RELEASE)
            for knowledge in (Knowledge.oracle, Knowledge.oracle_in_step)
        )
        bound = bound_ratios(self._workload(setting, seed), machine, static)
        return {
            "idle": static.idle_share,
            "throughputs": [guarded.tokens_per_s / static.tokens_per_s],
            "slowest_step": slowest_step(guarded, runs["bucketed"]),
            "ratios": {
                scheme: ratio_list(one, static)
                for scheme, one in [*runs.items(), ("oracle", oracle), ("oracle in step", in_step)]
            }
            | {f"bucketed, {one.num_ranks}": ratio_list(one, static) for one in by_size}
            | {"free migration": bound},
            "counts": {
                scheme: [one.num_switches, one.num_moves, one.num_retractions, one.num_refused]
                for scheme, one in runs.items()
            },
            "oracle_fraction": guarded.tokens_per_occupied_s / oracle.tokens_per_occupied_s,
            "oracle_in_step_fraction": guarded.tokens_per_occupied_s / in_step.tokens_per_occupied_s,
            "oracle_cost_fraction": cost(oracle) / cost(guarded),
            "gain_over_static": best_static_gain(guarded, by_size),
            "gain_over_near_static": near_gain([*runs.values()], by_size),
            "gains_over_static": {
                scheme: best_static_gain(one, by_size)
                for scheme, one in runs.items()
                if "static" not in scheme
            },
        }

    def _guard(self, setting: Setting) -> dict[str, Any]:
        """Static, bucketed and guarded only."""
        per_seed = []
        for seed in self.seeds[:1]:
            run = self._runner(setting, seed)
            static, bucketed, guarded = run(STATIC), run(BUCKETED), run(GUARDED_RELEASE)
            per_seed.append(
                {
                    "idle": static.idle_share,
                    "throughputs": [guarded.tokens_per_s / static.tokens_per_s],
                    "slowest_step": slowest_step(guarded, bucketed),
                    "ratios": {one.scheme: ratio_list(one, static) for one in (bucketed, guarded)},
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


def machine_of(setting: Setting) -> Machine:
    num_ranks = REGIMES[setting.regime].num_ranks
    believed: Clock = GpuClock(spec=setting.spec)
    budget = MemoryBudget(
        memory_bytes=MEMORY_BYTES[setting.memory], usable_share=0.9, other_bytes=setting.other_bytes
    )

    def kv_tokens(num_members: int) -> int:
        return plan_size(QWEN3_30B_A3B, num_members, budget, KvNeed(longest_tokens=0)).kv_tokens

    return Machine(
        num_ranks=num_ranks,
        floor=max(2, num_ranks // 4),
        clock=believed if setting.truth is None else GpuClock(spec=setting.truth),
        policy_clock=None if setting.truth is None else believed,
        running_limit_per_rank=setting.running_limit,
        member_sets=tuple(tuple(range(size)) for size in setting.set_sizes) or None,
        kv_tokens=kv_tokens,
        # Live it is 16; about 128 decisions a step tell what a thousand do, and drained ranks wait for none.
        decision_interval_iterations=REGIMES[setting.regime].cap_tokens // 128,
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


def near_gain(ours: Sequence[ScenarioResult], static_sizes: Sequence[ScenarioResult]) -> float:
    """The best of our runs at least as fast as each static group, lowest over those groups.

    What `best_static_gain` leaves out: a smaller static group just below our throughput may be cheap, and the
    question is then what a profile or a size of ours does at that group's throughput.
    """
    fastest = max(one.tokens_per_s for one in static_sizes)
    gains = []
    for rival in static_sizes:
        fast = [one for one in ours if one.tokens_per_s >= NEAR * rival.tokens_per_s]
        if fast and rival.tokens_per_s >= NEAR**5 * fastest:
            best = max(one.tokens_per_occupied_s for one in fast)
            gains.append(best / rival.tokens_per_occupied_s)
    return min(gains)


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
        values = [one[key] for one in per_seed]
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
