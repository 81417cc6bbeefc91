"""Run directories that no engine made: ledgers, schedules and metrics of a small model of a rollout step.

Every response decodes at one pace from the start. An elastic step takes two decisions: first the drained
workers leave, then the others outside the core move what they still run to it and leave.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from omegaconf import OmegaConf

from flexfloor.records import Aborted, Finished, LedgerRecord, Progress, Submitted, moved_reason
from flexfloor.rollout.ledger import Ledger, step_path
from flexfloor.schedule_record import (
    Absence,
    DecisionRecord,
    MoveRecord,
    PlannedPrompt,
    StepSchedule,
    write_schedule,
)
from flexfloor.types import FinishReason

TOKEN_S = 0.01
CAP_TOKENS = 3000
SAMPLES = 4


@dataclass(kw_only=True)
class Drawn:
    """A response as it went."""

    response_id: str
    prompt_id: str
    dp_rank: int
    num_tokens: int
    moved_to: int | None = None
    moved_at_s: float = 0.0

    @property
    def is_truncated(self) -> bool:
        return self.num_tokens == CAP_TOKENS

    @property
    def end_s(self) -> float:
        return self.num_tokens * TOKEN_S + (0.3 if self.moved_to is not None else 0.0)


@dataclass(kw_only=True)
class Step:
    rollout_step: int
    num_ranks: int
    drawn: list[Drawn]
    expected: dict[str, float]
    decisions: list[DecisionRecord] = field(default_factory=list)
    left_at_s: dict[int, float] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        return max(response.end_s for response in self.drawn)

    @property
    def occupied_s(self) -> float:
        return sum(self.left_at_s.get(rank, self.wall_s) for rank in range(self.num_ranks))

    @property
    def num_tokens(self) -> int:
        return sum(response.num_tokens for response in self.drawn)


def make_run(
    folder: Path,
    *,
    num_ranks: int = 8,
    num_steps: int = 3,
    per_rank: int = 16,
    is_elastic: bool = True,
    prompt_prefix: str = "p",
    seed: int = 0,
) -> list[Step]:
    """Write a whole run directory; runs of one seed draw the same lengths."""
    folder.mkdir(parents=True)
    mode = "elastic" if is_elastic else "static"
    config = {
        "run_dir": str(folder),
        "seed": seed,
        "num_steps": num_steps,
        "rollout": {"ep_size": num_ranks, "num_responses_per_prompt": SAMPLES},
        "membership": {"mode": mode, "floor": 2 if is_elastic else num_ranks},
    }
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    steps = [draw_step(index, num_ranks, per_rank, prompt_prefix, seed) for index in range(num_steps)]
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in steps:
            if is_elastic:
                _release(step)
            _write_ledger(folder, step)
            write_schedule(folder, schedule_of(step))
            metrics.write(json.dumps(_metrics(step, seed)) + "\n")
    return steps


def draw_step(index: int, num_ranks: int, per_rank: int, prompt_prefix: str, seed: int) -> Step:
    random = Random(f"{seed}/{index}")
    drawn, expected = [], {}
    for number in range(num_ranks * per_rank // SAMPLES):
        prompt = f"{prompt_prefix}{index * 1000 + number}"
        hardness = random.gauss(6.0, 0.6)
        expected[prompt] = 2.718 ** (hardness + random.gauss(0.1, 0.25))
        for sample in range(SAMPLES):
            tokens = min(CAP_TOKENS, max(5, int(2.718 ** random.gauss(hardness, 0.5))))
            name = f"{index}/{prompt}/{sample}"
            drawn.append(
                Drawn(response_id=name, prompt_id=prompt, dp_rank=len(drawn) % num_ranks, num_tokens=tokens)
            )
    return Step(rollout_step=index, num_ranks=num_ranks, drawn=drawn, expected=expected)


def schedule_of(step: Step) -> StepSchedule:
    return StepSchedule(
        rollout_step=step.rollout_step,
        num_ranks=step.num_ranks,
        wall_s=step.wall_s,
        batching="length_bucketed",
        batching_reason=f"bucket {step.rollout_step % 4 + 1} of 4",
        placement="balanced",
        placement_reason="even counts, longest first",
        starting_members=tuple(range(step.num_ranks)),
        predicted_peak_kv_tokens=(),
        kv_capacity_tokens=None,
        num_retractions=step.rollout_step,
        decisions=tuple(step.decisions),
        absences=tuple(Absence(dp_rank=r, from_s=s, to_s=None) for r, s in sorted(step.left_at_s.items())),
        prompts=tuple(
            PlannedPrompt(
                prompt_id=prompt,
                expected_tokens=tokens,
                median_tokens=0.9 * tokens,
                p90_tokens=1.9 * tokens,
                cap_share=0.01,
                num_seen=4.0,
            )
            for prompt, tokens in step.expected.items()
        ),
        calibration={
            "rank_correlation": 0.5 + 0.05 * step.rollout_step,
            "coverage_p90": 0.88,
            "bias_log": -0.04,
        },
    )


def _release(step: Step) -> None:
    last_s = [max(r.end_s for r in step.drawn if r.dp_rank == rank) for rank in range(step.num_ranks)]
    by_end = sorted(range(step.num_ranks), key=lambda rank: last_s[rank])
    core = by_end[-max(1, step.num_ranks // 4) :]
    first_s = last_s[by_end[step.num_ranks // 2]] + 0.05
    drained = [rank for rank in by_end if rank not in core and last_s[rank] < first_s]
    others = [rank for rank in by_end if rank not in core and rank not in drained]
    second_s = first_s + 0.3 * (max((last_s[rank] for rank in others), default=first_s) - first_s)
    moves = _move(step, others, core, second_s)
    wall_s = step.wall_s
    for at_s, leavers, moved in ((first_s, drained, []), (second_s, others, moves)):
        if leavers:
            step.decisions.append(_decision(step, at_s, leavers, moved, wall_s))
            step.left_at_s |= {rank: at_s + 0.2 for rank in leavers}


def _move(step: Step, sources: list[int], core: list[int], at_s: float) -> list[MoveRecord]:
    moves = []
    for response in step.drawn:
        if response.dp_rank in sources and response.end_s > at_s:
            response.moved_to, response.moved_at_s = core[len(moves) % len(core)], at_s
            moves.append(
                MoveRecord(
                    response_id=response.response_id,
                    source=response.dp_rank,
                    target=response.moved_to,
                    generated_tokens=int(at_s / TOKEN_S),
                )
            )
    return moves


def _decision(
    step: Step, at_s: float, leavers: list[int], moves: list[MoveRecord], wall_s: float
) -> DecisionRecord:
    reason = f"{len(leavers)} of {step.num_ranks} workers are drained; 210 iterations left, gain 3.1 s"
    if moves:
        reason = f"{len(moves)} responses move to the core, {len(leavers)} workers leave; gain 1.4 s"
    return DecisionRecord(
        at_s=at_s,
        leavers=tuple(leavers),
        moves=tuple(moves),
        reason=reason,
        predicted_gain_s=3.1,
        predicted_remaining_s=1.15 * (wall_s - at_s),
        outcome="done",
        realised_remaining_s=wall_s - at_s,
        took_s=0.2,
    )


def _write_ledger(folder: Path, step: Step) -> None:
    events: list[tuple[float, int, LedgerRecord]] = []
    for response in step.drawn:
        events += _records(response, step.rollout_step)
    path = step_path(folder / "ledger", step.rollout_step)
    with Ledger.open(
        path, rollout_step=step.rollout_step, weight_version=step.rollout_step, num_responses=len(step.drawn)
    ) as ledger:
        for _, _, record in sorted(events, key=lambda event: event[:2]):
            ledger.append(record)


def _records(response: Drawn, version: int) -> list[tuple[float, int, LedgerRecord]]:
    """With the time and the place among records of the same time. The clock starts at 50 s."""
    name, source, sample = response.response_id, response.dp_rank, int(response.response_id.rsplit("/", 1)[1])
    moved_s, target, done = response.moved_at_s, response.moved_to, 0

    def submitted(attempt: int, rank: int, at_s: float) -> Submitted:
        ids = (1, 2) if attempt == 1 else ()
        return Submitted(name, attempt, rank, 50.0 + at_s, response.prompt_id, sample, CAP_TOKENS, 7, ids)

    records: list[tuple[float, int, LedgerRecord]] = [(0.0, 0, submitted(1, source, 0.0))]
    if target is not None:
        done = int(moved_s / TOKEN_S)
        records += [
            (moved_s, 1, Progress(name, 1, 0, [5] * done, [-0.5] * done)),
            (moved_s, 2, Aborted(name, 1, source, 50.0 + moved_s, done, moved_reason(target))),
            (moved_s + 0.02, 3, submitted(2, target, moved_s + 0.02)),
        ]
    attempt, rank = (1, source) if target is None else (2, target)
    rest = response.num_tokens - done
    reason = FinishReason.length if response.is_truncated else FinishReason.stop
    end = Finished(
        name,
        attempt,
        rank,
        version,
        reason,
        response.num_tokens,
        CAP_TOKENS,
        50.0,
        50.0 + response.end_s,
    )
    records.append((response.end_s, 4, Progress(name, attempt, done, [5] * rest, [-0.5] * rest)))
    records.append((response.end_s, 5, end))
    return records


def _metrics(step: Step, seed: int) -> dict[str, float]:
    static_s = step.num_ranks * step.wall_s
    iterations = int(step.occupied_s / TOKEN_S)
    lengths = sorted(response.num_tokens for response in step.drawn)
    random = Random(f"reward {seed}/{step.rollout_step}")
    return {
        "rollout_step": step.rollout_step,
        "reward/mean": 0.3 + 0.1 * step.rollout_step + random.uniform(-0.03, 0.03),
        "length/mean_tokens": step.num_tokens / len(lengths),
        "length/median_tokens": lengths[len(lengths) // 2],
        "length/p90_tokens": lengths[len(lengths) * 9 // 10],
        "occupancy/num_tokens": step.num_tokens,
        "occupancy/occupied_worker_s": step.occupied_s,
        "occupancy/tail_idle_share": 0.1,
        "occupancy/static_occupied_worker_s": static_s,
        "occupancy/static_tail_idle_share": 0.3,
        "occupancy/tokens_per_occupied_worker_s": step.num_tokens / step.occupied_s,
        "occupancy/throughput_tokens_per_s": step.num_tokens / step.wall_s,
        "occupancy/worker_iterations": iterations,
        "occupancy/static_worker_iterations": int(static_s / TOKEN_S),
        "occupancy/tokens_per_worker_iteration": step.num_tokens / iterations,
        "membership/num_released": len(step.left_at_s),
        "rollout/num_responses": len(step.drawn),
    }
