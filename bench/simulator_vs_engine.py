"""Does the simulator count the worker-iterations that real SGLang ran? On the raw rows of bench/headline.py.

    python bench/headline.py --out headline.json ... && python bench/simulator_vs_engine.py headline.json

Every configuration of the file is simulated with the same lengths, plans and policies. Two things it cannot
know: when requests arrive, so they are spread evenly over as many iterations as the step took until its first
prefills were over; and how many iterations an order takes, so the medians over the file's real orders are
taken. A step may differ by 2 iterations a switch, or by 2 %. The last line is one JSON object.
"""

import argparse
import json
import sys
from bisect import bisect
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from headline_runs import NUM_RANKS, SETUPS, Bench, ForcedTrace, RanStep, Setup, responses_of

from flexfloor.driver.step_scheduler import StepScheduler
from flexfloor.scheduling.clocks import ScaledClock
from flexfloor.scheduling.gpu_clock import H200, GpuClock
from flexfloor.simulate.engine import Limits, SimulatedResponse, simulate_step

TRACES = Path(__file__).parent / "traces"
VOCABULARY = range(5, 17)
TOLERATED_SHARE, TOLERATED_PER_SWITCH = 0.02, 2


@dataclass(frozen=True, kw_only=True)
class SimulatedBench(Bench):
    """`Bench` without a server; `arrival_spreads` are those of the real steps, in order."""

    arrival_spreads: list[int] = field(default_factory=list)
    latency: tuple[int, int] = (0, 0)
    """Iterations from an order to its moves, and to the leavers being out."""

    def _step(self, setup: Setup, trace: ForcedTrace, scheduler: StepScheduler, step: int) -> RanStep:
        requests = {
            one.response_id: one for one in self._requests(trace, scheduler.batch(step).indices, step)
        }
        plan = scheduler.plan(list(requests.values()))
        spread = self.arrival_spreads[step]
        responses = [
            SimulatedResponse(
                response_id=name,
                prompt_tokens=len(requests[name].prompt_token_ids),
                num_tokens=requests[name].max_response_tokens,
                max_new_tokens=trace.cap_tokens,
                prediction=scheduler.prediction(requests[name].prompt_id),
                arrival_iteration=index * spread // len(plan.order),
            )
            for index, name in enumerate(plan.order)
        ]
        outcome = simulate_step(
            responses,
            plan.policy(num_ranks=NUM_RANKS, running_limit_per_rank=256),
            members=plan.members,
            limits=Limits(
                decision_interval_iterations=self.decision_interval_tokens,
                move_latency_iterations=self.latency[0],
                release_latency_iterations=self.latency[1],
            ),
            release=None if setup.release is None else scheduler.release_policy(),
            policy_clock=self.clock,
        )
        scheduler.observe(responses_of(list(requests.values()), trace.cap_tokens), rollout_step=step)
        return RanStep(
            num_tokens=sum(one.num_tokens for one in responses),
            wall_s=0.0,
            iterations=outcome.iterations,
            lengths=[],
            num_moves=len(outcome.moves),
            num_refused=0,
            num_retractions=outcome.num_retractions,
            tail_idle_share=0.0,
            decisions=[],
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("raw", type=Path)
    options = parser.parse_args()
    found = json.loads(options.raw.read_text())
    scale, num_steps = found["result"]["scale"], found["result"]["num_steps"]
    latency = latency_of([step for steps in found["steps"].values() for step in steps])
    rows = [compare(name, steps, scale, num_steps, latency) for name, steps in found["steps"].items()]
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    print(
        json.dumps(
            {**summary(rows), "move_latency_iterations": latency[0]}
            | {"release_latency_iterations": latency[1]}
        )
    )


def latency_of(steps: list[dict[str, Any]]) -> tuple[int, int]:
    """Medians over orders that were done: iterations to the first moved prefill, and to the last leaver."""
    moves, releases = [], []
    for step in steps:
        ends_ms = list(accumulate(step.get("iteration_ms", [])))
        for one in step["decisions"]:
            if one["outcome"] != "done" or not ends_ms:
                continue
            # Iterations begin a little after the step does, when the first request has arrived.
            late_ms = 1e3 * step["wall_s"] - ends_ms[-1]
            first, last = (
                bisect(ends_ms, 1e3 * at_s - late_ms) for at_s in (one["at_s"], one["at_s"] + one["took_s"])
            )
            releases.append(last - first)
            rows = step["members_running_most_context_prefill"]
            moves += [index - first for index in range(first, last) if rows[index][4] and one["moves"]][:1]
    return (round(median(moves)) if moves else 0, round(median(releases)) if releases else 0)


def compare(
    name: str, real: list[dict[str, Any]], scale: int, num_steps: int, latency: tuple[int, int]
) -> dict[str, Any]:
    """Worker-iterations of all steps of a configuration, as run and as simulated."""
    trace_name, setup = name.split("/")
    bench = SimulatedBench(
        url="",
        membership_folder=Path(),
        iteration_log=Path(),
        clock=ScaledClock(clock=GpuClock(spec=H200), model_tokens_per_token=scale),
        decision_interval_tokens=4,
        seed=0,
        num_steps=num_steps,
        work_dir=Path(),
        arrival_spreads=[arrival_spread(step) for step in real],
        latency=latency,
    )
    trace = ForcedTrace.read(TRACES / f"{trace_name}.json", scale, VOCABULARY)
    simulated = bench.run(SETUPS[setup], trace)
    as_run = [sum(row[0] for row in step["members_running_most_context_prefill"]) for step in real]
    counted = [step.iterations.worker_iterations for step in simulated]
    switches = [step.iterations.num_switches for step in simulated]
    excess = sum(
        max(0, abs(a - b) - NUM_RANKS * TOLERATED_PER_SWITCH * count)
        for a, b, count in zip(as_run, counted, switches, strict=True)
    )
    return {
        "configuration": name,
        "real_worker_iterations": sum(as_run),
        "simulated_worker_iterations": sum(counted),
        "relative_difference": round(sum(counted) / sum(as_run) - 1, 4),
        "relative_difference_beyond_switches": round(excess / sum(as_run), 4),
        "num_switches": sum(switches),
        "num_moves": [sum(step["num_moves"] for step in real), sum(step.num_moves for step in simulated)],
        "arrival_iterations": [arrival_spread(step) for step in real],
    }


def arrival_spread(step: dict[str, Any]) -> int:
    """Iterations until every response had begun: the first with as many prefilled as the step has."""
    rows = step["members_running_most_context_prefill"]
    most, at = 0, 0
    for index, row in enumerate(rows):
        if row[1] > most:
            most, at = row[1], index
        if row[4] == 0 and index > at + 3:
            break
    return at


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    static = [row for row in rows if row["num_switches"] == 0]
    elastic = [row for row in rows if row["num_switches"] > 0]
    return {
        "bench": "simulator_vs_engine",
        "num_configurations": len(rows),
        "static_max_relative_difference": max(
            (abs(row["relative_difference"]) for row in static), default=None
        ),
        "elastic_max_relative_difference": max(
            (abs(row["relative_difference"]) for row in elastic), default=None
        ),
        "elastic_max_relative_difference_beyond_switches": max(
            (row["relative_difference_beyond_switches"] for row in elastic), default=None
        ),
        "num_within_tolerance": sum(
            row["relative_difference_beyond_switches"] <= TOLERATED_SHARE for row in rows
        ),
    }


if __name__ == "__main__":
    main()
