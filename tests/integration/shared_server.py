"""The servers that the integration rooms share."""

import asyncio
import signal
import sys
from pathlib import Path

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.processes import ChildProcesses
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.ports import free_base_port
from flexfloor.rollout.server import server_argv

sys.path.append(str(Path(__file__).parent / "sglang"))
from server import Server, start_server

START_TIMEOUT_S = 600.0
OVERRIDES = (
    "experiment=quickstart",
    "rollout.collectives=shm",
    "rollout.kv_cache_tokens=8192",
    "rollout.max_running_requests=256",
    "model.context_tokens=512",
    "membership=elastic",
)


class SharedServer:
    """Started at once, on 4 elastic ranks over shared memory; `wait_ready` waits for it and gives its URL."""

    def __init__(self, children: ChildProcesses, checkpoint: Path, folder: Path) -> None:
        port = free_base_port()
        config = to_train_config(compose([*OVERRIDES, f"run_dir={folder}"]))
        self.membership_folder = folder / "membership"
        self.iteration_log_folder = folder / "iterations"
        self._url = f"http://127.0.0.1:{port}"
        self._process = children.start(
            "server",
            server_argv(
                config,
                port=port,
                model_path=str(checkpoint),
                weight_version=5,
                membership_folder=self.membership_folder,
                iteration_log_folder=self.iteration_log_folder,
            ),
            log_path=folder / "server.log",
            stop_signal=signal.SIGKILL,
        )
        self._is_ready = False

    def wait_ready(self) -> str:
        if not self._is_ready:
            asyncio.run(self._wait())
            self._is_ready = True
        return self._url

    async def _wait(self) -> None:
        async with EngineClient(self._url) as engine:
            await engine.wait_ready(START_TIMEOUT_S, check_alive=self._process.check)


class SmallServers:
    """Started at once: `one` rank, and two ranks over `gloo`."""

    def __init__(self, children: ChildProcesses, checkpoint: Path, folder: Path) -> None:
        self._children = children
        self._started = {
            "one": start_server(children, checkpoint, 1, folder / "one.log"),
            "gloo": start_server(children, checkpoint, 2, folder / "gloo.log"),
        }

    def wait_ready(self) -> dict[str, Server]:
        return {name: server.wait_ready(START_TIMEOUT_S) for name, server in self._started.items()}

    def stop(self) -> None:
        self._children.stop()
