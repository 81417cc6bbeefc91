"""The two services of a run, SGLang server and Megatron-Core trainer: started or attached, watched, ended."""

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from flexfloor.config import TrainConfig
from flexfloor.config.choices import MembershipMode
from flexfloor.errors import ChildProcessError, ConfigError, FlexfloorError
from flexfloor.left_overs import note_shared_memory, private_folder, remove_left_shared_memory
from flexfloor.membership.endpoint import CurveKeys
from flexfloor.processes import ChildProcess, ChildProcesses
from flexfloor.rollout.ports import free_base_port
from flexfloor.rollout.server import server_argv
from flexfloor.training.client import TrainerClient
from flexfloor.training.keys import read_keys
from flexfloor.training.launch import TrainerSpec, encode_spec, trainer_argv, trainer_env

_BLAME_GRACE_S = 6.0
"""SGLang's main process outlives a dead rank by about five seconds."""


class ServerEnded(ChildProcessError):
    """The server that this run started has ended; another one can take its place."""


class Services:
    """Starts what the config does not attach to; `check()` raises when anything started has ended."""

    def __init__(self, config: TrainConfig, children: ChildProcesses, socket_dir: Path) -> None:
        self._config = config
        self._children = children
        self._socket_dir = socket_dir
        self._run_dir = Path(config.run_dir)
        self._server: ChildProcess | None = None

    @property
    def membership_folder(self) -> Path | None:
        """Folder of the membership manager's socket; None for a static group."""
        membership = self._config.membership
        if membership.mode is MembershipMode.static:
            return None
        return Path(membership.folder) if membership.folder else self._socket_dir / "membership"

    @property
    def iteration_log(self) -> Path | None:
        """Where the ranks of the server log their iterations; None for an attached server that logs none."""
        cluster = self._config.cluster
        if cluster.server_url is not None:
            return None if cluster.iteration_log is None else Path(cluster.iteration_log)
        return self._run_dir / "logs" / "iterations"

    def check(self) -> None:
        """Raises ChildProcessError of the first process that has ended; ServerEnded when it is the server."""
        self._children.check(but=self._server)
        try:
            self._children.check()
        except ChildProcessError as error:
            raise ServerEnded(str(error)) from error

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """A failure inside the block becomes the end of a process where that is what is behind it."""
        try:
            yield
        except ChildProcessError:
            raise
        except FlexfloorError as error:
            try:
                self._children.check_for(_BLAME_GRACE_S, self.check)
            except ChildProcessError as ended:
                raise ended from error
            raise

    def is_trainer_healthy(self) -> bool:
        """True, or ChildProcessError with the last lines of the process that ended.

        The server does not count: a train step goes on without it.
        """
        self._children.check(but=self._server)
        return True

    def start_server(self, model_path: Path) -> str:
        """Start the server and return its URL at once; it becomes ready later."""
        cluster = self._config.cluster
        if cluster.server_url is not None:
            return cluster.server_url.rstrip("/")
        port = free_base_port()
        self._server = self._children.start(
            "server",
            server_argv(
                self._config,
                port=port,
                model_path=str(model_path),
                membership_folder=self.membership_folder,
                iteration_log_folder=self.iteration_log,
            ),
            env=_with_temporary(os.environ, self._socket_dir / "tmp"),
            log_path=self._run_dir / "logs" / "server.log",
            # Its schedulers end with it. Asked politely, it drains for seconds and then crashes on the ranks
            # that the same signal ended; there is nothing in it that would have to be saved.
            parent_death_signal=signal.SIGKILL,
            stop_signal=signal.SIGKILL,
        )
        return f"http://127.0.0.1:{port}"

    def note_server(self) -> None:
        """The server is ready. Once it was killed nobody could tell any more what it had shared."""
        if self._server is not None:
            below = [process.pid for process in self._server.descendants()]
            note_shared_memory(self._socket_dir, [self._server.pid, *below])

    def restart_server(self, model_path: Path) -> str:
        """End the server that this run has started, and start another one at the URL returned."""
        assert self._server is not None, "refused with the configuration"
        self._children.stop(self._server)
        return self.start_server(model_path)

    def start_trainer(self, model_path: Path, name: str) -> "TrainerHandle":
        """Start the trainer's processes and return at once; `ready` waits for them."""
        cluster = self._config.cluster
        if cluster.trainer_endpoint is not None:
            return TrainerHandle(self, cluster.trainer_endpoint, None, _keys(cluster.trainer_keys))
        endpoint = f"ipc://{self._socket_dir / name}.sock"
        spec_path = self._run_dir / f"{name}.json"
        spec_path.write_bytes(encode_spec(trainer_spec(self._config, endpoint, model_path)))
        child = self._children.start(
            name,
            trainer_argv(str(spec_path), self._config.trainer.num_ranks),
            env=_with_temporary(trainer_env(os.environ, cluster.device), self._socket_dir / "tmp"),
            log_path=self._run_dir / "logs" / f"{name}.log",
        )
        return TrainerHandle(self, endpoint, child)

    def stop(self, child: ChildProcess) -> None:
        self._children.stop(child)

    @property
    def trainer_start_timeout_s(self) -> float:
        return self._config.cluster.trainer_start_timeout_s

    @property
    def step_timeout_s(self) -> float:
        return self._config.trainer.step_timeout_s


class TrainerHandle:
    """A trainer that is starting or running."""

    def __init__(
        self, services: Services, endpoint: str, child: ChildProcess | None, keys: CurveKeys | None = None
    ) -> None:
        self._services = services
        self._endpoint = endpoint
        self._child = child
        self._keys = keys

    @contextmanager
    def ready(self) -> Iterator[TrainerClient]:
        """Wait for it and hand out its client; a trainer that was started here ends with the block."""
        services = self._services
        with TrainerClient(
            self._endpoint,
            is_alive=services.is_trainer_healthy,
            deadline_s=services.step_timeout_s,
            keys=self._keys,
        ) as client:
            client.wait_ready(services.trainer_start_timeout_s)
            yield client
            if self._child is None:
                return
            # Its work is done and saved: one that will not end in good order is ended by force below.
            with suppress(FlexfloorError):
                client.shutdown()
        services.stop(self._child)


def trainer_spec(config: TrainConfig, endpoint: str, model_path: Path) -> TrainerSpec:
    """What the trainer of this run needs to know, wherever it is started."""
    return TrainerSpec(
        endpoint=endpoint,
        keys_path=config.cluster.trainer_keys,
        checkpoint_path=str(model_path),
        device=config.cluster.device,
        dtype=config.model.dtype,
        context_tokens=config.model.context_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        seed=config.seed,
        trainer=config.trainer,
        algorithm=config.algorithm,
        work_dir=str(Path(config.run_dir) / "sync"),
    )


def _keys(path: str | None) -> CurveKeys | None:
    """Raises ConfigError where the file cannot serve."""
    try:
        return None if path is None else read_keys(Path(path))
    except (OSError, ValueError) as error:
        fix = "name the file that flexfloor-prepare wrote, or leave it out"
        raise ConfigError("cluster.trainer_keys", path, str(error), fix) from error


@contextmanager
def private_socket_dir() -> Iterator[Path]:
    """A short path that only this user can enter; Unix socket paths are limited to about 100 bytes."""
    remove_left_shared_memory()
    with private_folder() as folder:
        yield folder


def _with_temporary(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Temporary files of a child in a folder that goes with the run, also when the child is killed."""
    folder.mkdir(mode=0o700, exist_ok=True)
    # Compiled kernels are worth keeping.
    kept = str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")
    return {"TORCHINDUCTOR_CACHE_DIR": kept, **env, "TMPDIR": str(folder)}
