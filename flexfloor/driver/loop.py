"""The main job: rollout, reward, train, sync weights, step by step."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from flexfloor.config import TrainConfig
from flexfloor.config.choices import MembershipMode, ReleaseUse
from flexfloor.data.order import PromptOrder
from flexfloor.data.reward_pool import RewardPool
from flexfloor.data.rewards import RewardSpec, check_reward
from flexfloor.driver.ahead import AheadFigures, LogprobsAhead
from flexfloor.driver.batch import step_requests, train_sequences
from flexfloor.driver.figures import step_metrics
from flexfloor.driver.prepare import prepare_model
from flexfloor.driver.prompts import TokenizedPrompt, load_tokenized_prompts, load_tokenizer
from flexfloor.driver.rollout_phase import RolloutOutcome, RolloutPhase
from flexfloor.driver.scheduling import open_scheduler
from flexfloor.driver.services import Services, private_socket_dir
from flexfloor.driver.step_scheduler import StepScheduler
from flexfloor.driver.worker_uses import check_worker_use
from flexfloor.processes import ChildProcesses
from flexfloor.report.console import RunConsole, occupation_rows, summary_rows
from flexfloor.report.metrics import MetricsLog, read_metrics
from flexfloor.training.client import TrainerClient
from flexfloor.training.messages import SyncStats, TrainStats
from flexfloor.types import ResponseRequest

logger = logging.getLogger(__name__)

FIRST_WEIGHT_VERSION = 0
_NO_SYNC = SyncStats(seconds=0.0, num_bytes=0, weight_checksum="")


def run(config: TrainConfig) -> int:
    """Train as configured; 0 when every step is done.

    Raises FlexfloorError. However it ends, the run directory is readable and no process that it started is
    left.
    """
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
        stack.enter_context(_sigterm_interrupts())
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
        metrics = stack.enter_context(MetricsLog.open(run_dir, config.logging, asdict(config)))
        order = PromptOrder(num_prompts=len(prompts), seed=config.seed, drop_last=config.data.drop_last)
        scheduler = stack.enter_context(open_scheduler(config, prompts, order))
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
        )
        with console.phase("starting", None):
            trainer = stack.enter_context(trainer_start.ready())
            rollout.wait_ready()
        console.say(
            f"ready: rollout on {config.rollout.ep_size} ranks, training on {config.trainer.num_ranks}"
        )
        with services.blamed():
            Run(
                config,
                prompts,
                scheduler,
                rollout,
                trainer,
                server_url,
                metrics,
                console,
                restart_server=lambda: services.restart_server(model_path),
            ).steps()
        if config.save_hf:
            trainer.save_hf(str(run_dir / "hf"))
    _show_summary(config, console)
    return 0


class Run:
    """The steps of one run over services that are ready."""

    def __init__(
        self,
        config: TrainConfig,
        prompts: list[TokenizedPrompt],
        scheduler: StepScheduler,
        rollout: RolloutPhase,
        trainer: TrainerClient,
        server_url: str,
        metrics: MetricsLog,
        console: RunConsole,
        *,
        restart_server: Callable[[], str],
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._scheduler = scheduler
        self._rollout = rollout
        self._trainer = trainer
        self._server_url = server_url
        self._metrics = metrics
        self._console = console
        self._restart_server = restart_server
        self._is_starting = False
        self._seconds: dict[str, float] = {}

    def steps(self) -> None:
        # Also for a server that was there before: from here on its weights are known to be the trainer's.
        self._sync(FIRST_WEIGHT_VERSION)
        for step in range(self._config.num_steps):
            self._step(step, FIRST_WEIGHT_VERSION + step)
            self._maybe_checkpoint(step + 1)

    def _step(self, step: int, weight_version: int) -> None:
        self._seconds = {}
        batch = self._scheduler.batch(step)
        prompts = [self._prompts[index] for index in batch.indices]
        requests = step_requests(
            prompts, rollout_step=step, run_seed=self._config.seed, rollout=self._config.rollout
        )
        with self._logprobs_ahead(requests, weight_version) as ahead:
            with self._timed("rollout"):
                outcome = self._rollout.run(
                    prompts,
                    requests,
                    batch=batch,
                    rollout_step=step,
                    weight_version=weight_version,
                    ahead=ahead,
                )
            is_server_whole = not outcome.drawn.exited
            if not is_server_whole and step + 1 < self._config.num_steps:
                self._start_anew()
                is_server_whole = True
            with self._timed("train"):
                stats = self._train(outcome, ahead)
        self._wait_for_new_server()
        with self._timed("sync"):
            # A server that has lost ranks for good takes no weights, and nobody draws from it any more.
            sync = self._sync(weight_version + 1) if is_server_whole else _NO_SYNC
        self._record(step, outcome, stats, sync, None if ahead is None else ahead.figures())

    def _logprobs_ahead(
        self, requests: Sequence[ResponseRequest], weight_version: int
    ) -> AbstractContextManager[LogprobsAhead | None]:
        """For one step; inside it nothing else may be asked of the trainer before `results`."""
        if self._config.release.use is not ReleaseUse.logprobs:
            return nullcontext()
        return LogprobsAhead(
            requests,
            trainer=self._trainer,
            algorithm=self._config.algorithm,
            weight_version=weight_version,
        )

    def _start_anew(self) -> None:
        """Another server in place of the one whose ranks have exited; it loads while the trainer trains."""
        self._server_url = self._restart_server()
        self._rollout.use_server(self._server_url)
        self._is_starting = True

    def _wait_for_new_server(self) -> None:
        if self._is_starting:
            with self._timed("restart"), self._console.phase("starting", None):
                self._rollout.wait_ready()
            self._is_starting = False

    def _maybe_checkpoint(self, num_done: int) -> None:
        every = self._config.trainer.checkpoint_every_steps
        if every and num_done % every == 0:
            self._trainer.save_checkpoint(
                str(Path(self._config.run_dir) / "checkpoints" / f"step-{num_done:06d}")
            )

    def _train(self, outcome: RolloutOutcome, ahead: LogprobsAhead | None) -> TrainStats:
        responses = {response.response_id: response for response in outcome.drawn.result.responses}
        with self._console.phase("train", None):
            sequences = train_sequences(
                outcome.requests,
                responses,
                outcome.rewards,
                self._config.algorithm.advantage_norm,
                None if ahead is None else ahead.results(),
            )
            return self._trainer.train_step(sequences)

    def _sync(self, weight_version: int) -> SyncStats:
        with self._console.phase("sync", None):
            sync = self._trainer.sync_weights(weight_version, self._server_url)
        logger.info(
            "weight_version=%d checksum=%s bytes=%d took_s=%.3f",
            weight_version,
            sync.weight_checksum,
            sync.num_bytes,
            sync.seconds,
        )
        return sync

    def _record(
        self,
        step: int,
        outcome: RolloutOutcome,
        train: TrainStats,
        sync: SyncStats,
        ahead: AheadFigures | None,
    ) -> None:
        record = step_metrics(
            rewards=list(outcome.rewards.values()),
            drawn=outcome.drawn,
            schedule=outcome.schedule,
            train=train,
            sync=sync,
            ahead=ahead,
            seconds=self._seconds,
        )
        self._metrics.write(step, record)
        self._console.step_line(step, self._config.num_steps, record)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self._seconds[phase] = time.monotonic() - started_s


def _show_summary(config: TrainConfig, console: RunConsole) -> None:
    records = read_metrics(Path(config.run_dir))
    edge_steps = min(5, len(records))
    columns = ("", f"first {edge_steps} steps", f"last {edge_steps} steps", "all steps")
    group = f"{config.membership.mode.value} group of {config.rollout.ep_size} workers"
    console.table(f"{config.num_steps} steps, {group}", columns, summary_rows(records, edge_steps=edge_steps))
    if config.membership.mode is MembershipMode.elastic:
        columns = ("sum of all steps", "a static group", "this run", "ratio")
        console.table("what the workers were occupied for", columns, occupation_rows(records))
    console.say(f"run directory: {config.run_dir}")


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM (a job's time limit, `kill`) ends the run the way Ctrl-C does: in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
