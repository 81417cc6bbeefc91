"""The numbers of one rollout step under the names that they have in `metrics.jsonl`. Pure."""

from collections.abc import Mapping, Sequence

from flexfloor.driver.ahead import AheadFigures
from flexfloor.rollout.occupancy import Occupancy
from flexfloor.rollout.scheduled_step import ScheduledResult
from flexfloor.schedule_record import StepSchedule
from flexfloor.training.messages import SyncStats, TrainStats


def step_metrics(
    *,
    rewards: Sequence[float],
    drawn: ScheduledResult,
    schedule: StepSchedule,
    train: TrainStats,
    sync: SyncStats,
    seconds: Mapping[str, float],
    ahead: AheadFigures | None = None,
) -> dict[str, float]:
    """One flat record; `seconds` are the phases' wall times by name.

    `ahead`: of logprobs that were computed while workers were away.
    """
    result, occupancy = drawn.result, drawn.occupancy
    return {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        **_length_metrics(occupancy),
        **_occupancy_metrics(occupancy),
        "rollout/num_responses": len(result.responses),
        "rollout/num_resumed": result.num_resumed,
        "rollout/num_retries": result.num_retries,
        "rollout/num_lost_ranks": len(drawn.lost),
        "rollout/num_duplicates": result.num_duplicates,
        "membership/num_released": drawn.num_released,
        "membership/num_refused": drawn.num_refused,
        "schedule/num_moves": result.num_moves,
        "schedule/num_decisions": len(schedule.decisions),
        "schedule/num_retractions": schedule.num_retractions,
        "schedule/starting_size": len(schedule.starting_members),
        "schedule/is_bucketed": float(schedule.batching == "length_bucketed"),
        **{f"prediction/{name}": value for name, value in schedule.calibration.items()},
        **_train_metrics(train),
        **({} if ahead is None else _ahead_metrics(ahead)),
        "sync/num_bytes": sync.num_bytes,
        **{f"time/{name}_s": value for name, value in seconds.items()},
    }


def _length_metrics(occupancy: Occupancy) -> dict[str, float]:
    lengths = occupancy.lengths
    return {
        "length/mean_tokens": lengths.mean_tokens,
        "length/median_tokens": lengths.median_tokens,
        "length/p90_tokens": lengths.p90_tokens,
        "length/p99_tokens": lengths.p99_tokens,
        "length/max_tokens": lengths.max_tokens,
        "length/p99_over_median": lengths.p99_over_median,
        "length/truncated_share": occupancy.truncated_share,
    }


def _occupancy_metrics(occupancy: Occupancy) -> dict[str, float]:
    metrics = {
        "occupancy/num_tokens": occupancy.num_tokens,
        "occupancy/occupied_worker_s": occupancy.occupied_worker_s,
        "occupancy/tail_idle_share": occupancy.tail_idle_share,
        "occupancy/static_occupied_worker_s": occupancy.static_occupied_worker_s,
        "occupancy/static_tail_idle_share": occupancy.static_tail_idle_share,
        "occupancy/tokens_per_occupied_worker_s": occupancy.tokens_per_occupied_worker_s,
        "occupancy/throughput_tokens_per_s": occupancy.tokens_per_s,
    }
    counted = occupancy.iterations
    if counted is not None:
        metrics |= {
            "occupancy/worker_iterations": counted.worker_iterations,
            "occupancy/idle_worker_iterations": counted.idle_worker_iterations,
            "occupancy/prefill_worker_iterations": counted.prefill_worker_iterations,
            "occupancy/static_worker_iterations": counted.static_worker_iterations,
            "occupancy/tokens_per_worker_iteration": counted.tokens_per_worker_iteration,
        }
    return metrics


def _ahead_metrics(ahead: AheadFigures) -> dict[str, float]:
    return {
        "logprobs/num_groups": ahead.num_groups,
        "logprobs/num_early_groups": ahead.num_early_groups,
        "logprobs/early_token_share": ahead.early_token_share,
        "logprobs/saved_s": ahead.saved_s,
        "logprobs/late_s": ahead.late_s,
    }


def _train_metrics(train: TrainStats) -> dict[str, float]:
    return {
        "train/loss": train.loss,
        "train/grad_norm": train.grad_norm,
        "train/learning_rate": train.learning_rate,
        "train/clip_fraction": train.clip_fraction,
        "train/importance_clip_fraction": train.importance_clip_fraction,
        "train/entropy": train.entropy,
        "train/kl": train.kl,
        "train/mean_abs_logprob_diff": train.mean_abs_logprob_diff,
        "train/num_tokens": train.num_tokens,
        "train/logprob_s": train.logprob_seconds,
    }
