"""`flexfloor-plan`: memory of a rank at every size of the EP group, and the least floor. Starts nothing."""

import sys
from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from flexfloor.cli.compose import to_config
from flexfloor.cli.job import run_command
from flexfloor.config.plan import PlanConfig, validate_plan
from flexfloor.errors import ConfigError
from flexfloor.experts.memory import (
    GroupSize,
    KvNeed,
    MemoryBudget,
    SlotFloor,
    check_floor,
    least_floor,
    plan_sizes,
    slot_floor,
)
from flexfloor.model_memory import format_bytes
from flexfloor.report.console import RunConsole

COLUMNS = ("ranks", "slots", "experts", "KV left", "KV tokens", "needed", "fits")


def main() -> int:
    register()
    return run_command("plan", PlanConfig, _run)


def register() -> None:
    """Make `plan_schema` known to Hydra; may be called again."""
    ConfigStore.instance().store(name="plan_schema", node=PlanConfig)


def _run(node: DictConfig) -> int:
    config = to_config(node, PlanConfig)
    validate_plan(config)
    model, ep_size = config.model, config.ep_size
    budget = MemoryBudget(
        memory_bytes=config.cluster.device_memory_bytes,
        usable_share=config.usable_share,
        other_bytes=config.other_bytes,
    )
    need = KvNeed(longest_tokens=config.longest_sequence_tokens, group_tokens=config.tail_tokens)
    sizes = plan_sizes(model, ep_size, budget, need)
    floor = _least_floor(config, budget, need)
    reserved = slot_floor(model, ep_size, _slot_floor(config, floor, budget, need), budget)
    console = RunConsole(progress=False)
    title = f"{model.name} on {config.cluster.name}: {format_bytes(budget.usable_bytes)} a rank"
    title += f", {format_bytes(model.dense_bytes)} of them dense weights"
    console.table(title, COLUMNS, [_cells(size) for size in sizes])
    for line in _closing_lines(sizes, floor, reserved):
        console.say(line)
    return 0


def _least_floor(config: PlanConfig, budget: MemoryBudget, need: KvNeed) -> int:
    try:
        return least_floor(config.model, config.ep_size, budget, need)
    except ValueError as error:
        fix = "raise num_ranks, lower longest_tokens, tail_tokens or other_bytes, or choose a larger cluster"
        raise ConfigError("num_ranks", config.ep_size, str(error), fix) from error


def _slot_floor(config: PlanConfig, floor: int, budget: MemoryBudget, need: KvNeed) -> int:
    """The size whose slots are reserved: the user's if it fits, else the least."""
    if config.slot_floor is None:
        return floor
    try:
        check_floor(config.slot_floor, config.model, config.ep_size, budget, need)
    except ValueError as error:
        fix = f"set slot_floor to {floor} or more"
        raise ConfigError("slot_floor", config.slot_floor, str(error), fix) from error
    return config.slot_floor


def _cells(size: GroupSize) -> Sequence[str]:
    return (
        str(size.num_ranks),
        str(size.num_expert_slots),
        format_bytes(size.expert_bytes),
        format_bytes(size.kv_bytes),
        str(size.kv_tokens),
        str(size.kv_tokens_needed),
        "yes" if size.is_feasible else "no",
    )


def _closing_lines(sizes: Sequence[GroupSize], floor: int, reserved: SlotFloor) -> list[str]:
    lines = [f"least floor: {floor} of {sizes[0].num_ranks} ranks"]
    reason = next((size.reason for size in sizes if not size.is_feasible), None)
    if reason is not None:
        lines.append(f"below it: {reason}")
    lines.append(
        f"slot_floor={reserved.floor}: {reserved.num_expert_slots} slots in every layer from the start, "
        f"{reserved.num_spare_slots} of them spare in the full group"
    )
    lines.append(
        f"their cost in the full group: {format_bytes(reserved.spare_bytes)} a rank, "
        f"{reserved.kv_tokens} instead of {reserved.kv_tokens_without} KV tokens"
    )
    mirror_bytes = sizes[0].expert_bytes
    lines.append(
        f"host mirror of the experts, for lost ranks: {format_bytes(mirror_bytes)} of host memory a rank, "
        f"{format_bytes(sizes[0].num_ranks * mirror_bytes)} for all"
    )
    return lines


if __name__ == "__main__":
    sys.exit(main())
