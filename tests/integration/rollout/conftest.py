"""One flexfloor-serve on 4 ranks for this folder, started with the command line that a run uses."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.processes import ChildProcesses
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.ports import free_base_port
from flexfloor.rollout.server import server_argv

sys.path.append(str(Path(__file__).parents[1] / "sglang"))
from tiny_moe import write_checkpoint

_START_TIMEOUT_S = 240.0
_OVERRIDES = (
    "experiment=quickstart",
    "rollout.ep_size=4",
    "rollout.collectives=shm",
    "rollout.kv_cache_tokens=8192",
    "model.context_tokens=512",
)


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL. Ends with the module: the ranks of an idle server still spin."""
    folder = tmp_path_factory.mktemp("server")
    checkpoint = write_checkpoint(folder / "model")
    port = free_base_port()
    config = to_train_config(compose([*_OVERRIDES, f"run_dir={folder}"]))
    url = f"http://127.0.0.1:{port}"
    with ChildProcesses() as children:
        argv = server_argv(config, port=port, model_path=str(checkpoint), weight_version=5)
        server = children.start("server", argv, log_path=folder / "server.log")

        async def wait() -> None:
            async with EngineClient(url) as engine:
                await engine.wait_ready(_START_TIMEOUT_S, check_alive=server.check)

        asyncio.run(wait())
        yield url
