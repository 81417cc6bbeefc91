"""A tiny Qwen3-MoE checkpoint, sequences for it, and a trainer on it."""

import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexfloor.config.schema import AlgorithmConfig, Device, Dtype, TrainerConfig
from flexfloor.errors import ChildProcessError
from flexfloor.training.client import TrainerClient
from flexfloor.training.launch import TrainerSpec, encode_spec, trainer_argv, trainer_env
from flexfloor.training.megatron.cpu import torchvision_ops
from flexfloor.types import TrainSequence

torchvision_ops.define_missing()
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

VOCAB_SIZE = 32
CONTEXT_TOKENS = 256
# Two optimizer steps and a reference model, so that every kind of forward pass takes place.
ALGORITHM = {"num_minibatches": 2, "kl_coef": 0.01}
READY_DEADLINE_S = 240.0


def write_checkpoint(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Random weights, scaled up so that the model is sure of something and routing differs between tokens."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "max_position_embeddings": CONTEXT_TOKENS,
            "tie_word_embeddings": False,
            "rope_theta": 1_000_000.0,
            **overrides,
        }
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
        model.lm_head.weight.mul_(4.0)
    model.save_pretrained(folder)
    return folder


def make_sequences(
    count: int, *, seed: int = 0, median_tokens: int = 20, max_tokens: int = 120
) -> list[TrainSequence]:
    """Random tokens with lengths of a long tail, plausible rollout logprobs and advantages of both signs."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(count):
        length = min(max_tokens, max(1, round(median_tokens * rng.lognormvariate(0.0, 0.7))))
        sequences.append(
            TrainSequence(
                prompt_token_ids=tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(3, 8))),
                response_token_ids=tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(length)),
                rollout_logprobs=tuple(-rng.uniform(0.1, 6.0) for _ in range(length)),
                advantage=rng.gauss(0.0, 1.0),
            )
        )
    return sequences


def hf_logprobs(checkpoint: Path, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
    # More threads than free cores make such small operations slower by orders of magnitude.
    torch.set_num_threads(1)
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    found = []
    for sequence in sequences:
        ids = torch.tensor(sequence.prompt_token_ids + sequence.response_token_ids)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        places = torch.arange(len(sequence.prompt_token_ids) - 1, len(ids) - 1)
        found.append(logprobs[places, ids[places + 1]])
    return found


def largest_difference(found: Sequence[Sequence[float]], expected: Sequence[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((torch.tensor(left) - right).abs().max()) for left, right in pairs)


@dataclass
class RunningTrainer:
    client: TrainerClient
    process: "subprocess.Popen[bytes]"
    log_path: Path


@dataclass
class SharedTrainer:
    running: RunningTrainer
    start: Path
    """Distributed checkpoint of the state right after the start."""
    start_checksum: str


@contextmanager
def running_trainer(
    folder: Path,
    checkpoint: Path,
    *,
    num_ranks: int = 2,
    trainer: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    dtype: Dtype = Dtype.float32,
) -> Iterator[RunningTrainer]:
    """A trainer with EP over all its ranks unless `trainer` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"ep_size": num_ranks, "micro_batch_tokens": 2048, "learning_rate": 1e-3, **(trainer or {})}
    spec = TrainerSpec(
        endpoint=f"ipc://{folder}/sockets/trainer",
        checkpoint_path=str(checkpoint),
        device=Device.cpu,
        dtype=dtype,
        context_tokens=CONTEXT_TOKENS,
        max_response_tokens=128,
        seed=0,
        trainer=TrainerConfig(num_ranks=num_ranks, **sizes),
        algorithm=AlgorithmConfig(**(algorithm or {})),
        work_dir=str(folder / "work"),
    )
    spec_path, log_path = folder / "spec.json", folder / "trainer.log"
    spec_path.write_bytes(encode_spec(spec))
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            trainer_argv(str(spec_path), num_ranks),
            env=trainer_env(os.environ, Device.cpu),
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def is_alive() -> bool:
        if process.poll() is None:
            return True
        raise ChildProcessError(f"trainer exited with {process.returncode}:\n{log_path.read_text()[-4000:]}")

    try:
        with TrainerClient(spec.endpoint, is_alive=is_alive, deadline_s=120.0) as client:
            client.wait_ready(READY_DEADLINE_S)
            yield RunningTrainer(client, process, log_path)
            if process.poll() is None:
                client.shutdown()
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]", patience_s: float = 15.0) -> None:
    limit_s = time.monotonic() + patience_s
    while process.poll() is None and time.monotonic() < limit_s:
        try:
            process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            process.terminate()
    if process.poll() is None:
        process.kill()
        process.wait()
