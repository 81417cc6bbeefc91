"""From the configuration to the scheduling side of a run: clock, memory, history."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flexfloor.config import TrainConfig
from flexfloor.config.choices import ClockName, Device, ExpertSlots, MembershipMode
from flexfloor.config.memory import USABLE_SHARE
from flexfloor.data.order import PromptOrder
from flexfloor.driver.prompts import TokenizedPrompt
from flexfloor.driver.step_scheduler import KnownPrompt, RolloutShape, StepScheduler
from flexfloor.experts.memory import MemoryBudget, slot_floor
from flexfloor.scheduling.clocks import CorrectedClock, ScaledClock, make_clock
from flexfloor.scheduling.cost import Clock
from flexfloor.scheduling.gpu_clock import GPUS
from flexfloor.scheduling.history import LengthHistory

HISTORY_FILE = "lengths.sqlite"


@contextmanager
def open_scheduler(
    config: TrainConfig,
    prompts: Sequence[TokenizedPrompt],
    order: PromptOrder,
    *,
    run_id: str,
    first_step: int = 0,
) -> Iterator[StepScheduler]:
    """The scheduler of a run over its length history, which is closed at the end.

    It plans the steps from `first_step` on as if the history ended there.
    """
    run_dir = Path(config.run_dir)
    path = Path(config.scheduling.history) if config.scheduling.history else run_dir / HISTORY_FILE
    with LengthHistory.open(path) as history:
        yield StepScheduler(
            config.scheduling,
            rollout_shape(config),
            prompts=[
                KnownPrompt(prompt_id=item.prompt.prompt_id, num_tokens=len(item.token_ids))
                for item in prompts
            ],
            order=order,
            history=history,
            dataset=dataset_name(config),
            run_id=run_id,
            clock=cost_clock(config),
            kv_tokens=kv_tokens_of(config),
            seed=config.seed,
            folder=run_dir / "schedule",
            first_step=first_step,
        )


def rollout_shape(config: TrainConfig) -> RolloutShape:
    rollout, membership = config.rollout, config.membership
    is_elastic = membership.mode is MembershipMode.elastic
    return RolloutShape(
        num_ranks=rollout.ep_size,
        batch_size=rollout.num_prompt_groups,
        num_responses_per_prompt=rollout.num_responses_per_prompt,
        max_response_tokens=rollout.max_response_tokens,
        max_running_requests=rollout.max_running_requests,
        floor=membership.floor if is_elastic else rollout.ep_size,
        member_sets=tuple(tuple(members) for members in membership.member_sets),
    )


def cost_clock(config: TrainConfig) -> Clock:
    """`scheduling.clock`; `auto` takes the cluster's kind of GPU where it is known."""
    scheduling = config.scheduling
    name = scheduling.clock.value
    if scheduling.clock is ClockName.auto:
        name = _gpu_of(config) or ClockName.neutral.value
    clock: Clock = make_clock(name)
    if scheduling.model_tokens_per_token > 1:
        return ScaledClock(clock=clock, model_tokens_per_token=scheduling.model_tokens_per_token)
    # On GPUs its seconds are those of the wall, and what iterations really take corrects it.
    return CorrectedClock(clock=clock) if config.cluster.device is Device.cuda else clock


def kv_tokens_of(config: TrainConfig) -> Callable[[int], int | None]:
    """KV tokens of one rank by group size. An engine's pool does not change while it runs."""
    tokens = config.rollout.kv_cache_tokens
    if tokens is None and config.cluster.device is Device.cuda:
        tokens = _estimated_kv_tokens(config)
    return lambda num_members: tokens


def dataset_name(config: TrainConfig) -> str:
    """Prompt ids mean something within one dataset only."""
    data = config.data
    if config.scheduling.dataset:
        return config.scheduling.dataset
    parts = [data.source.value, data.path, data.task]
    return "/".join(part for part in parts if part)


def run_id(run_dir: Path) -> str:
    """The same when a run goes on in its directory, another one for every other directory."""
    resolved = run_dir.resolve()
    return f"{resolved.name}-{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"


def _gpu_of(config: TrainConfig) -> str | None:
    if config.cluster.device is not Device.cuda:
        return None
    return next((name for name in sorted(GPUS, key=len, reverse=True) if name in config.cluster.name), None)


def _estimated_kv_tokens(config: TrainConfig) -> int:
    membership, ep_size = config.membership, config.rollout.ep_size
    budget = MemoryBudget(memory_bytes=config.cluster.device_memory_bytes, usable_share=USABLE_SHARE)
    keeps_slots = (
        membership.mode is MembershipMode.elastic and membership.expert_slots is not ExpertSlots.exact
    )
    floor = membership.floor if keeps_slots else ep_size
    return slot_floor(config.model, ep_size, floor, budget).kv_tokens
