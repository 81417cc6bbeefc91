"""The main job: what it needs is started, its steps are run, and what they left is shown."""

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from flexfloor.config import TrainConfig
from flexfloor.config.choices import MembershipMode
from flexfloor.data.order import PromptOrder
from flexfloor.data.reward_pool import RewardPool
from flexfloor.data.rewards import RewardSpec, check_reward
from flexfloor.driver.prepare import prepare_model
from flexfloor.driver.prompts import load_tokenized_prompts, load_tokenizer
from flexfloor.driver.resume import run_lock, run_start
from flexfloor.driver.rollout_phase import RolloutPhase
from flexfloor.driver.scheduling import open_scheduler
from flexfloor.driver.services import Services, private_socket_dir
from flexfloor.driver.steps import Run
from flexfloor.driver.stopping import STOPPED, StopRequested, StopSignals
from flexfloor.driver.worker_uses import check_worker_use
from flexfloor.errors import ConfigError, FlexfloorError
from flexfloor.processes import ChildProcesses
from flexfloor.report.console import RunConsole, occupation_rows, summary_rows
from flexfloor.report.metrics import MetricsLog, read_metrics


class RunFailed(FlexfloorError):
    """The operating system refused something, for example room on the disk."""


def run(config: TrainConfig) -> int:
    """Train as configured; 0 when every step is done, STOPPED when a signal asked to save and end before.

    Raises FlexfloorError, with a note of how to go on. However it ends, the run directory is readable and no
    process that it started is left.
    """
    try:
        return _noted(config)
    except StopRequested:
        console = RunConsole(progress=config.logging.progress)
        console.say("asked to end before the first step; nothing to save")
        return STOPPED


def _noted(config: TrainConfig) -> int:
    note = f"What was finished is kept. Go on with: flexfloor-train resume={config.run_dir}"
    try:
        return _run(config)
    except ConfigError:
        raise
    except FlexfloorError as error:
        error.add_note(note)
        raise
    except OSError as error:
        problem = RunFailed(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        problem.add_note(note)
        raise problem from error


def _run(config: TrainConfig) -> int:
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    os.chmod(run_dir, 0o700)
    check_worker_use(config, os.environ)
    console = RunConsole(progress=config.logging.progress)
    tokenizer = load_tokenizer(config.model)
    reward = RewardSpec(name=config.data.reward, options=config.data.reward_options)
    check_reward(reward)
    prompts = load_tokenized_prompts(config, tokenizer)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        stack.enter_context(run_lock(run_dir))
        start = run_start(config, console.say)
        children = stack.enter_context(ChildProcesses())
        services = Services(config, children, stack.enter_context(private_socket_dir()))
        rewards = stack.enter_context(
            RewardPool(
                reward,
                num_workers=config.data.reward_workers,
                timeout_s=config.data.reward_timeout_s,
                on_error=config.data.reward_on_error,
                log_path=run_dir / "logs" / "rewards.log",
            )
        )
        metrics = stack.enter_context(
            MetricsLog.open(run_dir, config.logging, asdict(config), first_step=start.first_step)
        )
        order = PromptOrder(num_prompts=len(prompts), seed=config.seed, drop_last=config.data.drop_last)
        scheduler = stack.enter_context(
            open_scheduler(config, prompts, order, run_id=start.run_id, first_step=start.first_step)
        )
        with stop.interruptible():
            model_path = prepare_model(config, services, console)
        server_url = services.start_server(model_path)
        trainer_start = services.start_trainer(model_path, "trainer")
        rollout = RolloutPhase(
            config,
            server_url=server_url,
            membership_folder=services.membership_folder,
            iteration_log=services.iteration_log,
            scheduler=scheduler,
            tokenizer=tokenizer,
            rewards=rewards,
            console=console,
            check=services.check,
            on_ready=services.note_server,
        )
        with console.phase("starting", None), stop.interruptible():
            trainer = stack.enter_context(trainer_start.ready())
            rollout.wait_ready()
        console.say(
            f"ready: rollout on {config.rollout.ep_size} ranks, training on {config.trainer.num_ranks}"
        )
        steps = Run(
            config,
            prompts,
            scheduler,
            rollout,
            trainer,
            server_url,
            metrics,
            console,
            stop,
            start=start,
            restart_server=lambda: services.restart_server(model_path),
            blamed=services.blamed,
        )
        try:
            with services.blamed():
                steps.run()
        except StopRequested:
            steps.save_stopped()
        if config.save_hf and steps.num_done:
            trainer.save_hf(str(run_dir / "hf"))
    if steps.num_done:
        _show_summary(config, console)
    return 0 if steps.num_done == config.num_steps else STOPPED


def _show_summary(config: TrainConfig, console: RunConsole) -> None:
    records = read_metrics(Path(config.run_dir))
    edge_steps = min(5, len(records))
    columns = ("", f"first {edge_steps} steps", f"last {edge_steps} steps", "all steps")
    group = f"{config.membership.mode.value} group of {config.rollout.ep_size} workers"
    console.table(f"{len(records)} steps, {group}", columns, summary_rows(records, edge_steps=edge_steps))
    if config.membership.mode is MembershipMode.elastic:
        columns = ("sum of all steps", "a static group", "this run", "ratio")
        console.table("what the workers were occupied for", columns, occupation_rows(records))
    console.say(f"run directory: {config.run_dir}")
