"""`flexfloor-simulate`: what scheduling would save on given lengths, and how many workers. Starts nothing."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from flexfloor.cli.compose import to_config
from flexfloor.cli.job import run_command
from flexfloor.config.simulate import SimulateConfig, TraceConfig, TraceSource
from flexfloor.data.length_dumps import DumpOptions, read_dump
from flexfloor.errors import ConfigError
from flexfloor.experts.memory import KvNeed, MemoryBudget, least_floor, plan_size
from flexfloor.report.console import RunConsole
from flexfloor.rollout.ledger import read_ledger
from flexfloor.scheduling.clocks import ScaledClock, make_clock
from flexfloor.scheduling.cost import Clock
from flexfloor.simulate.picture import Point, pareto_svg
from flexfloor.simulate.results import ScenarioResult
from flexfloor.simulate.scenario import Machine, Workload
from flexfloor.simulate.study import Study, run_study
from flexfloor.simulate.traces import (
    REGIMES,
    LoggedGroup,
    Regime,
    Trace,
    generate,
    trace_from_groups,
    with_earlier_pass,
)

COLUMNS = ("schedule", "workers", "per worker time", "throughput", "idle", "switches", "moves", "retracted")
PROMPTS_PER_STEP = 32
LARGE_GROUP = 32


def main() -> int:
    register()
    return run_command("simulate", SimulateConfig, _run)


def register() -> None:
    """Make `simulate_schema` known to Hydra; may be called again."""
    ConfigStore.instance().store(name="simulate_schema", node=SimulateConfig)


def _run(node: DictConfig) -> int:
    config = to_config(node, SimulateConfig)
    workload, machine = _workload(config), _machine(config)
    console = RunConsole(progress=sys.stderr.isatty())
    with console.phase("simulating", None) as advance:
        study = run_study(
            workload,
            machine,
            window_steps=config.window_steps,
            price=config.price,
            advance=lambda done, total, name: advance(done, f"of {total} {name}"),
        )
    _show(study, workload, machine, console)
    if config.picture is not None:
        _draw(study, workload, Path(config.picture))
        console.say(f"picture: {config.picture}")
    return 0


def _show(study: Study, workload: Workload, machine: Machine, console: RunConsole) -> None:
    trace, static = workload.trace, study.static
    mean = static.num_tokens / sum(step.num_responses for step in static.steps)
    title = (
        f"{trace.name}: {len(static.steps)} steps, mean {mean:.0f} tokens, "
        f"{100 * trace.truncated_share:.1f} % at the cap of {trace.cap_tokens}; "
        f"{machine.num_ranks} workers, clock {machine.clock.name}; static group = 1"
    )
    runs = [*study.runs, *study.guarded_by_size[1:]]
    console.table(title, COLUMNS, [_cells(study, run) for run in runs])
    console.say(f"first step of `bucketed`: {study.runs[1].steps[0].batching_reason}")
    chosen = {f"recommended at price {study.price:g}": study.recommended}
    chosen["fewest at the static group's throughput"] = study.fewest or study.recommended
    for what, run in chosen.items():
        ratios = study.ratios(run)
        console.say(
            f"{what}: {run.num_ranks} of {machine.num_ranks} workers, guarded: "
            f"{ratios.occupied:.2f} x tokens per worker time, {ratios.throughput:.2f} x throughput"
        )


def _cells(study: Study, run: ScenarioResult) -> Sequence[str]:
    ratios = study.ratios(run)
    return (
        run.scheme,
        f"{run.mean_starting_size:.2g}" if run.num_ranks < 10 else f"{run.mean_starting_size:.0f}",
        f"{ratios.occupied:.2f}",
        f"{ratios.throughput:.2f}",
        f"{run.idle_share:.2f}",
        str(run.num_switches),
        str(run.num_moves),
        str(run.num_retractions),
    )


def _draw(study: Study, workload: Workload, path: Path) -> None:
    points = []
    for run in [*study.runs, *study.guarded_by_size[1:]]:
        ratios = study.ratios(run)
        is_static = run.scheme.startswith(("static", "bucketed"))
        points.append(
            Point(
                label=run.scheme if run.num_ranks == study.num_ranks else f"{run.scheme} {run.num_ranks}",
                throughput=ratios.throughput,
                occupied=ratios.occupied,
                is_elastic=not is_static,
            )
        )
    try:
        path.write_text(pareto_svg(points, f"{workload.trace.name}, {study.num_ranks} workers"))
    except OSError as error:
        raise ConfigError("picture", str(path), str(error), "name a file in a folder of yours") from error


def _workload(config: SimulateConfig) -> Workload:
    wanted = config.trace
    if wanted.source is TraceSource.regime:
        regime = _regime(wanted)
        passes = wanted.num_passes + 2 * wanted.warm
        trace = generate(regime, num_steps=wanted.num_steps, num_passes=passes, seed=config.seed)
        per_step = wanted.num_prompts_per_step or regime.num_prompts_per_step
        return Workload(
            trace=trace, num_prompts_per_step=per_step, num_history_passes=2 * wanted.warm, seed=config.seed
        )
    trace = _logged_trace(wanted)
    num_history = 0
    if wanted.warm:
        # What predictions are worth is known when prompts came a second time: two passes before the first.
        while trace.num_passes < 3:
            trace = with_earlier_pass(trace, seed=config.seed + trace.num_passes)
        num_history = 2
    return Workload(
        trace=trace,
        num_prompts_per_step=wanted.num_prompts_per_step or PROMPTS_PER_STEP,
        num_history_passes=num_history,
        seed=config.seed,
    )


def _regime(wanted: TraceConfig) -> Regime:
    regime = REGIMES.get(wanted.regime)
    if regime is None:
        fix = f"choose one of {', '.join(REGIMES)}"
        raise ConfigError("trace.regime", wanted.regime, "there is no such regime", fix)
    return regime if wanted.prompt_share is None else regime.with_prompt_share(wanted.prompt_share)


def _logged_trace(wanted: TraceConfig) -> Trace:
    paths = [Path(path).expanduser() for path in wanted.paths]
    for path in paths:
        if not path.exists():
            fix = "name existing files or folders"
            raise ConfigError("trace.paths", str(path), "there is no such file or folder", fix)
    is_run = wanted.source is TraceSource.run
    groups, cap_tokens = _ledger_groups(paths) if is_run else _dump_groups(wanted, paths)
    try:
        return trace_from_groups(
            groups,
            name=", ".join(path.name for path in paths),
            cap_tokens=wanted.cap_tokens or cap_tokens,
        )
    except ValueError as error:
        fix = "name logs that hold responses, and set trace.cap_tokens to what the run had"
        raise ConfigError("trace.paths", wanted.paths, str(error), fix) from error


def _dump_groups(wanted: TraceConfig, paths: Sequence[Path]) -> tuple[list[LoggedGroup], int | None]:
    options = DumpOptions(cap_tokens=wanted.cap_tokens)
    lengths: dict[tuple[str, int], list[int]] = {}
    prompt_tokens: dict[str, int] = {}
    caps = []
    for one in read_dump(str(wanted.source), paths, options):
        lengths.setdefault((one.prompt_id, one.rollout_step), []).append(one.num_tokens)
        prompt_tokens[one.prompt_id] = one.prompt_tokens
        caps.append(one.cap_tokens or 0)
    return _by_pass(lengths, prompt_tokens), max(caps, default=0) or None


def _ledger_groups(run_dirs: Sequence[Path]) -> tuple[list[LoggedGroup], int | None]:
    """Finished responses of every step of these runs, in order; a later run is taken for further passes."""
    lengths: dict[tuple[str, int], list[int]] = {}
    prompt_tokens: dict[str, int] = {}
    caps = [0]
    step = 0
    for run_dir in run_dirs:
        for path in sorted((run_dir / "ledger").glob("step-*.ledger")):
            for response in read_ledger(path).state.finished_responses():
                lengths.setdefault((response.prompt_id, step), []).append(response.num_tokens)
                prompt_tokens[response.prompt_id] = len(response.prompt_token_ids)
                caps.append(response.cap_tokens)
            step += 1
    return _by_pass(lengths, prompt_tokens), max(caps) or None


def _by_pass(lengths: dict[tuple[str, int], list[int]], prompt_tokens: dict[str, int]) -> list[LoggedGroup]:
    """The n-th step that a prompt occurs in is its n-th pass."""
    seen: dict[str, int] = {}
    groups = []
    for prompt_id, step in sorted(lengths, key=lambda key: key[1]):
        index = seen.get(prompt_id, 0)
        seen[prompt_id] = index + 1
        groups.append(
            LoggedGroup(
                prompt_id=prompt_id,
                pass_index=index,
                prompt_tokens=prompt_tokens[prompt_id],
                lengths=tuple(lengths[prompt_id, step]),
            )
        )
    return groups


def _machine(config: SimulateConfig) -> Machine:
    num_ranks = config.num_ranks or (
        _regime(config.trace).num_ranks
        if config.trace.source is TraceSource.regime
        else config.cluster.num_devices
    )
    clock: Clock = make_clock(config.clock_name)
    if config.model_tokens_per_token > 1:
        clock = ScaledClock(clock=clock, model_tokens_per_token=config.model_tokens_per_token)
    interval = config.decision_interval_iterations or (64 if num_ranks > LARGE_GROUP else 16)
    return Machine(
        num_ranks=num_ranks,
        floor=_floor(config, num_ranks),
        clock=clock,
        running_limit_per_rank=config.running_limit_per_rank,
        kv_tokens=_kv_tokens(config),
        decision_interval_iterations=interval,
    )


def _budget(config: SimulateConfig) -> MemoryBudget:
    return MemoryBudget(
        memory_bytes=config.cluster.device_memory_bytes,
        usable_share=config.usable_share,
        other_bytes=config.other_bytes,
    )


def _floor(config: SimulateConfig, num_ranks: int) -> int:
    """The given one; else a quarter, where a rank of so small a group still holds a longest response."""
    longest = (config.trace.cap_tokens or 0) or 16384
    try:
        least = least_floor(config.model, num_ranks, _budget(config), KvNeed(longest_tokens=longest))
    except ValueError as error:
        fix = "raise num_ranks, lower other_bytes, or choose a larger cluster"
        raise ConfigError("num_ranks", num_ranks, str(error), fix) from error
    floor = config.floor or max(least, -(-num_ranks // 4))
    if not least <= floor <= num_ranks:
        fix = f"set floor to {least} .. {num_ranks}, or null"
        raise ConfigError("floor", floor, "so few ranks cannot hold the model, or it is above num_ranks", fix)
    return floor


def _kv_tokens(config: SimulateConfig) -> Callable[[int], int | None]:
    budget = _budget(config)

    @cache
    def kv_tokens(num_members: int) -> int:
        return plan_size(config.model, num_members, budget, KvNeed(longest_tokens=0)).kv_tokens

    return kv_tokens


if __name__ == "__main__":
    sys.exit(main())
