"""Trainer, SGLang and transformers on the same weights, before and after weight syncs, on all four ranks."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_qwen import hf_logprobs, largest_difference, make_sequences, running_trainer

from flexfloor.config.schema import Dtype, WeightSyncPath
from flexfloor.training.client import TrainerClient, TrainerError
from flexfloor.training.weight_sync import WeightPusher
from flexfloor.types import TrainSequence

sys.path.append(str(Path(__file__).parents[1] / "sglang"))
from server import Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NUM_RANKS = 4
LIMIT = 1e-4


@dataclass
class Both:
    server: Server
    client: TrainerClient


@pytest.fixture(scope="module")
def both(
    shared_server_url: str, shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    """The shared server of four ranks and a trainer of two, on the same weights."""
    folder = tmp_path_factory.mktemp("parity")
    server = Server(url=shared_server_url, num_ranks=NUM_RANKS)
    with running_trainer(folder / "trainer", shared_checkpoint) as trainer:
        trainer.client.sync_weights(6, server.url)
        yield Both(server, trainer.client)


def generated(server: Server, rank: int) -> list[TrainSequence]:
    """Responses sampled at temperature 1 on one rank, with the logprobs that decoding returned."""
    prompts = [sequence.prompt_token_ids for sequence in make_sequences(12, seed=rank)]
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    answers = server.generate(
        input_ids=[list(prompt) for prompt in prompts],
        sampling_params=[{**sampling, "sampling_seed": 100 * rank + n} for n in range(len(prompts))],
        return_logprob=True,
        routed_dp_rank=rank,
    )
    return [_as_sequence(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def _as_sequence(prompt: tuple[int, ...], answer: dict[str, Any]) -> TrainSequence:
    pairs = answer["meta_info"]["output_token_logprobs"]
    return TrainSequence(
        prompt_token_ids=prompt,
        response_token_ids=tuple(pair[1] for pair in pairs),
        rollout_logprobs=tuple(pair[0] for pair in pairs),
        advantage=1.0 if len(prompt) % 2 else -1.0,
    )


def scored(server: Server, sequences: list[TrainSequence], rank: int) -> tuple[list[list[float]], set[str]]:
    """Logprobs of the given responses by prefill on one rank, and the weight versions that it reports."""
    answers = server.generate(
        input_ids=[list(seq.prompt_token_ids + seq.response_token_ids) for seq in sequences],
        sampling_params={"temperature": 1.0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        routed_dp_rank=rank,
    )
    logprobs = [
        [pair[0] for pair in answer["meta_info"]["input_token_logprobs"]][-len(seq.response_token_ids) :]
        for seq, answer in zip(sequences, answers, strict=True)
    ]
    return logprobs, {answer["meta_info"]["weight_version"] for answer in answers}


def tensors(values: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in values]


def test_three_engines_agree_and_every_rank_follows_a_sync(both: Both, shared_checkpoint: Path) -> None:
    sequences = [sequence for rank in range(NUM_RANKS) for sequence in generated(both.server, rank)]
    assert sum(len(sequence.response_token_ids) for sequence in sequences) >= 1000
    decoded = tensors([list(sequence.rollout_logprobs) for sequence in sequences])
    before = both.client.logprobs(sequences)
    assert largest_difference(before, decoded) <= LIMIT
    assert largest_difference(before, hf_logprobs(shared_checkpoint, sequences)) <= LIMIT

    stats = both.client.train_step(sequences, learning_rate=3e-3)
    assert stats.mean_abs_logprob_diff < 1e-5
    synced = both.client.sync_weights(7, both.server.url)
    assert synced.weight_checksum == both.client.weight_checksum()
    after = both.client.logprobs(sequences)
    assert largest_difference(after, tensors(before)) > 1e-3
    for rank in range(NUM_RANKS):
        logprobs, versions = scored(both.server, sequences, rank)
        assert largest_difference(logprobs, tensors(after)) <= LIMIT, f"rank {rank}"
        assert versions == {"7"}


@pytest.fixture(scope="module")
def own_group() -> Iterator[None]:
    """The pusher runs in this process here, which needs a default group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _folder(weights: dict[str, torch.Tensor], source: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("path", list(WeightSyncPath))
def test_every_path_puts_the_same_weights_on_every_rank(
    both: Both, own_group: None, shared_checkpoint: Path, tmp_path: Path, path: WeightSyncPath
) -> None:
    """Small buckets, so that there are many; random weights of its own for each path."""
    number = list(WeightSyncPath).index(path)
    generator = torch.Generator().manual_seed(number)
    weights = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(shared_checkpoint / "model.safetensors").items()
    }
    pusher = WeightPusher(
        path,
        backend="gloo",
        bucket_bytes=200_000,
        work_dir=str(tmp_path),
        checkpoint_path=str(shared_checkpoint),
        dtype=Dtype.float32,
    )
    sequences = make_sequences(8, seed=20 + number)
    stats = pusher.push(iter(weights.items()), 100 + number, both.server.url, 120.0)
    assert stats.num_bytes == sum(tensor.nbytes for tensor in weights.values())
    pusher.push(iter(weights.items()), 200 + number, both.server.url, 120.0)
    expected = hf_logprobs(_folder(weights, shared_checkpoint, tmp_path / "expected"), sequences)
    for rank in range(NUM_RANKS):
        logprobs, versions = scored(both.server, sequences, rank)
        assert versions == {str(200 + number)}
        assert largest_difference(logprobs, expected) <= LIMIT


def test_a_refusal_names_the_servers_message_and_the_next_sync_works(both: Both) -> None:
    both.server.post("begin_weight_update")
    with pytest.raises(TrainerError, match="server_info failed"):
        both.client.sync_weights(8, "http://127.0.0.1:9", deadline_s=5.0)
    assert both.client.sync_weights(9, both.server.url).num_bytes > 0
