"""One trainer of two expert-parallel ranks serves all tests; each begins from the same checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_qwen import ALGORITHM, SharedTrainer, running_trainer, write_checkpoint

from flexfloor.training.client import TrainerClient


@pytest.fixture(scope="session")
def hf_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="session")
def shared_trainer(hf_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedTrainer]:
    folder = tmp_path_factory.mktemp("two")
    with running_trainer(folder, hf_checkpoint, algorithm=ALGORITHM) as running:
        checksum = running.client.weight_checksum()
        running.client.save_checkpoint(str(folder / "start"))
        yield SharedTrainer(running, folder / "start", checksum)


@pytest.fixture
def client(shared_trainer: SharedTrainer) -> TrainerClient:
    """The shared trainer with the weights and optimizer state of its start."""
    shared_trainer.running.client.load_checkpoint(str(shared_trainer.start))
    return shared_trainer.running.client
