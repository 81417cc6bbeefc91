"""One 4-rank server for the rooms that need a server but not a fresh one: a start costs a minute of imports.

Its ranks spin while they are idle, so it starts only when the first test asks for it, and the tests that need
none or their own run first.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.data.arithmetic import build_tokenizer
from flexfloor.data.tiny_moe import create_tiny_moe
from flexfloor.processes import ChildProcesses
from flexfloor.rollout.engine_client import EngineClient
from flexfloor.rollout.ports import free_base_port
from flexfloor.rollout.server import server_argv

SERVER_START_TIMEOUT_S = 600.0
LATE = ("shared_server_url", "both")
"""Fixtures that need the shared server; `both` is a trainer beside it."""
SHAPE = {"num_layers": 2, "hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64}
OVERRIDES = (
    "experiment=quickstart",
    "rollout.collectives=shm",
    "rollout.kv_cache_tokens=8192",
    "rollout.max_running_requests=256",
    "model.context_tokens=512",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: any(name in LATE for name in getattr(item, "fixturenames", ())))


@pytest.fixture(scope="session")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, scaled up so that the model is sure of something and routing differs between tokens."""
    folder = tmp_path_factory.mktemp("shared") / "model"
    create_tiny_moe(folder, tokenizer=build_tokenizer(), seed=0, **SHAPE)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.dim() > 1:
            tensor *= 16.0 if name == "lm_head.weight" else 4.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def shared_server_url(shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server started with the command line that a run uses. Tests may leave any weights in it."""
    folder = tmp_path_factory.mktemp("server")
    port = free_base_port()
    config = to_train_config(compose([*OVERRIDES, f"run_dir={folder}"]))
    url = f"http://127.0.0.1:{port}"
    with ChildProcesses() as children:
        argv = server_argv(config, port=port, model_path=str(shared_checkpoint), weight_version=5)
        server = children.start("server", argv, log_path=folder / "server.log", stop_signal=signal.SIGKILL)

        async def wait() -> None:
            async with EngineClient(url) as engine:
                await engine.wait_ready(SERVER_START_TIMEOUT_S, check_alive=server.check)

        asyncio.run(wait())
        yield url
