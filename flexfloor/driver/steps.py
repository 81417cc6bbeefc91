"""The steps of a run: rollout, reward, train, sync weights, over services that are ready.

A server that this run started and that ends in a rollout or a sync, or has lost ranks before a sync, is
started anew, gets the step's very weights from the trainer, and the step goes on from its ledger.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from flexfloor.config import TrainConfig
from flexfloor.config.choices import ReleaseUse
from flexfloor.config.resume_rules import config_digest
from flexfloor.driver.ahead import AheadFigures, LogprobsAhead
from flexfloor.driver.batch import step_requests, train_sequences
from flexfloor.driver.checkpoints import Checkpoints, new_state
from flexfloor.driver.figures import step_metrics
from flexfloor.driver.prompts import TokenizedPrompt
from flexfloor.driver.resume import CHECKPOINTS, RunStart
from flexfloor.driver.rollout_phase import RolloutOutcome, RolloutPhase
from flexfloor.driver.services import ServerEnded
from flexfloor.driver.step_scheduler import StepBatch, StepScheduler
from flexfloor.driver.stopping import StopSignals
from flexfloor.errors import ChildProcessError, FlexfloorError, StaleWeightsError
from flexfloor.report.console import RunConsole
from flexfloor.report.metrics import MetricsLog
from flexfloor.rollout.ledger import step_path
from flexfloor.training.client import TrainerClient
from flexfloor.training.messages import SyncStats, TrainStats
from flexfloor.types import ResponseRequest

logger = logging.getLogger(__name__)

FIRST_WEIGHT_VERSION = 0
_OWN = ("rollout_step", "rollout/num_resumed", "time/train_s", "time/sync_s", "sync/num_bytes")
"""Figures of a step that are its own, whatever was drawn before."""
_NO_SYNC = SyncStats(seconds=0.0, num_bytes=0, weight_checksum="")


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
        stop: StopSignals,
        *,
        start: RunStart,
        restart_server: Callable[[], str],
        blamed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.num_done = start.first_step
        """Steps that were drawn, trained and recorded."""
        self._config = config
        self._stop = stop
        self._start = start
        self._last_saved = start.first_step
        self._checkpoints = Checkpoints(
            Path(config.run_dir) / CHECKPOINTS, keep=config.trainer.checkpoint_keep
        )
        self._prompts = prompts
        self._scheduler = scheduler
        self._rollout = rollout
        self._trainer = trainer
        self._server_url = server_url
        self._metrics = metrics
        self._console = console
        self._restart_server = restart_server
        self._blamed = blamed
        self._is_starting = False
        self._num_deaths = 0
        """Of servers, since the last whole step."""
        self._checksum = ""
        """Of the trainer's weights, as they were synced last; empty where they have changed since."""
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        """All steps that are left. Raises StopRequested between or in steps when the signal comes."""
        first = self._start.first_step
        if self._start.checkpoint is not None:
            self._trainer.load_checkpoint(str(self._start.checkpoint))
        if self._start.is_resume:
            self._rollout.settle()
        # Also for a server that was there before: from here on its weights are known to be the trainer's.
        self._push(FIRST_WEIGHT_VERSION + first)
        self._check_restored()
        for step in range(first, self._config.num_steps):
            self._step(step, FIRST_WEIGHT_VERSION + step)
            self.num_done = step + 1
            self._num_deaths = 0
            self._maybe_checkpoint()

    def _check_restored(self) -> None:
        wanted = self._start.weight_checksum
        if wanted is not None and self._checksum != wanted:
            raise StaleWeightsError(
                f"{self._start.checkpoint} was saved from weights of checksum {wanted}, and what was loaded "
                f"from it has {self._checksum}. Fix: move it away, and resume from the one before it"
            )

    def _step(self, step: int, weight_version: int) -> None:
        self._seconds = {"sync": 0.0}
        batch = self._scheduler.batch(step)
        prompts = [self._prompts[index] for index in batch.indices]
        requests = step_requests(
            prompts, rollout_step=step, run_seed=self._config.seed, rollout=self._config.rollout
        )
        while not self._try_step(step, weight_version, batch, prompts, requests):
            self._bring_back(weight_version)

    def _try_step(
        self,
        step: int,
        weight_version: int,
        batch: StepBatch,
        prompts: Sequence[TokenizedPrompt],
        requests: Sequence[ResponseRequest],
    ) -> bool:
        """False when the server has ended in the rollout; what it drew is on record."""
        with self._logprobs_ahead(requests, weight_version) as ahead:
            try:
                with self._timed("rollout"), self._stop.interruptible(), self._blamed():
                    outcome = self._rollout.run(
                        prompts,
                        requests,
                        batch=batch,
                        rollout_step=step,
                        weight_version=weight_version,
                        weight_checksum=self._checksum,
                        ahead=ahead,
                    )
            except ServerEnded as error:
                self._count_death(error)
                return False
            is_server_whole = outcome.drawn.is_server_whole
            if not is_server_whole and step + 1 < self._config.num_steps:
                self._start_anew()
                is_server_whole = True
            with self._timed("train"):
                stats = self._train(outcome, ahead)
        # A server that has lost ranks for good takes no weights, and nobody draws from it any more.
        self._checksum = ""
        sync = self._finish_sync(weight_version + 1) if is_server_whole else _NO_SYNC
        self._record(step, outcome, stats, sync, None if ahead is None else ahead.figures())
        return True

    def save_stopped(self) -> None:
        """Save what the steps so far made, where they made anything."""
        done = f"{self.num_done} of {self._config.num_steps} steps"
        self._console.say(f"asked to end after {done}; saving")
        if self.num_done > self._last_saved:
            self._checkpoint()

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
        """Another server in place of one that has ended or lost ranks; it loads while the trainer trains."""
        if self._config.cluster.server_url is not None:
            raise FlexfloorError(
                f"the server at {self._server_url} has lost ranks and takes no more weights, and this run "
                "did not start it. Fix: start it again"
            )
        self._server_url = self._restart_server()
        self._rollout.use_server(self._server_url)
        self._is_starting = True

    def _wait_for_new_server(self) -> None:
        if self._is_starting:
            with self._timed("restart"), self._console.phase("starting", None):
                self._rollout.wait_ready()
            self._is_starting = False

    def _finish_sync(self, weight_version: int) -> SyncStats:
        """Wait for a server that is starting, and push; again into another one where it ends meanwhile."""
        try:
            self._wait_for_new_server()
            with self._timed("sync"):
                return self._push_blamed(weight_version)
        except ServerEnded as error:
            self._count_death(error)
            return self._bring_back(weight_version)

    def _push(self, weight_version: int) -> SyncStats:
        try:
            return self._push_blamed(weight_version)
        except ServerEnded as error:
            self._count_death(error)
            return self._bring_back(weight_version)

    def _push_blamed(self, weight_version: int) -> SyncStats:
        try:
            with self._blamed():
                return self._sync(weight_version)
        except ChildProcessError:
            raise
        except FlexfloorError as error:
            # A server that lives without some of its ranks takes no weights: as good as ended.
            lost = self._rollout.lost_ranks()
            if not lost:
                raise
            raise ServerEnded(f"the server has lost ep_ranks {list(lost)}: {error}") from error

    def _bring_back(self, weight_version: int) -> SyncStats:
        """A server in place of one that has ended, with these weights. Raises ServerEnded at the limit."""
        while True:
            self._start_anew()
            try:
                self._wait_for_new_server()
                return self._push_blamed(weight_version)
            except ServerEnded as error:
                self._count_death(error)

    def _count_death(self, error: ServerEnded) -> None:
        """Raises it where servers do nothing but end."""
        self._num_deaths += 1
        limit = self._config.cluster.max_server_restarts
        if self._num_deaths > limit:
            raise error
        logger.info("event=server_ended restart=%d of %d %s", self._num_deaths, limit, error)
        self._console.say(
            f"the server has ended or lost ranks; starting it anew ({self._num_deaths} of {limit}). Its last "
            f"lines are in {Path(self._config.run_dir) / 'logs' / 'server.log'}"
        )

    def _maybe_checkpoint(self) -> None:
        every = self._config.trainer.checkpoint_every_steps
        if every and self.num_done % every == 0:
            self._checkpoint()

    def _checkpoint(self) -> None:
        config, step = self._config, self.num_done
        state = new_state(
            step=step,
            weight_version=FIRST_WEIGHT_VERSION + step,
            weight_checksum=self._checksum or self._trainer.weight_checksum(),
            seed=config.seed,
            config_digest=config_digest(config),
            run_id=self._start.run_id,
            steps_per_pass=self._scheduler.steps_per_pass,
            windows=self._scheduler.open_windows(step),
            ledger=step_path(Path(config.run_dir) / "ledger", step - 1),
        )
        self._checkpoints.save(state, self._trainer.save_checkpoint)
        self._last_saved = step

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
        self._checksum = sync.weight_checksum
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
        if outcome.is_replayed:
            record = {**record, **_of_the_rollout(self._start.records.get(step, {}))}
        self._metrics.write(step, record)
        self._console.step_line(step, self._config.num_steps, record)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """A try that a dead server ended counts as well."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started_s


def _of_the_rollout(record: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a step that was drawn before, and is only trained again."""
    return {
        name: value for name, value in record.items() if not name.startswith("train/") and name not in _OWN
    }
