"""What two expert-parallel ranks compute, against transformers and against themselves."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_qwen import (
    ALGORITHM,
    CONTEXT_TOKENS,
    VOCAB_SIZE,
    SharedTrainer,
    hf_logprobs,
    largest_difference,
    make_sequences,
    running_trainer,
)

from flexfloor.training.client import TrainerClient, TrainerError, TrainerRefused
from flexfloor.types import TrainSequence

pytestmark = pytest.mark.integration


def test_weights_survive_the_round_trip_bit_for_bit(
    client: TrainerClient, hf_checkpoint: Path, tmp_path: Path
) -> None:
    client.save_hf(str(tmp_path / "saved"))
    source, saved = (load_file(path / "model.safetensors") for path in (hf_checkpoint, tmp_path / "saved"))
    assert source.keys() == saved.keys()
    assert all(torch.equal(source[name], saved[name]) for name in source)


def test_logprobs_equal_those_of_transformers(client: TrainerClient, hf_checkpoint: Path) -> None:
    sequences = make_sequences(64, seed=1)
    assert sum(len(sequence.response_token_ids) for sequence in sequences) >= 1000
    expected = hf_logprobs(hf_checkpoint, sequences)
    assert torch.cat(expected).std() > 1.0, "a model that is sure of nothing proves nothing"
    assert largest_difference(client.logprobs(sequences), expected) <= 1e-4


def test_saved_folder_computes_what_the_trainer_computes(client: TrainerClient, tmp_path: Path) -> None:
    sequences = make_sequences(16, seed=2)
    before = client.logprobs(sequences)
    client.train_step(sequences, learning_rate=1e-2)
    client.save_hf(str(tmp_path / "trained"))
    after = client.logprobs(sequences)
    assert largest_difference(before, [torch.tensor(values) for values in after]) > 1e-2
    assert largest_difference(after, hf_logprobs(tmp_path / "trained", sequences)) <= 1e-4


# Two ranks have dp_size=2 and ep_size=2 in the shared trainer.
LAYOUTS = {
    "one_rank": {"num_ranks": 1, "ep_size": 1, "micro_batch_tokens": 300, "recompute": True},
    "data": {"num_ranks": 2, "ep_size": 1, "distributed_optimizer": False},
    "tensor": {"num_ranks": 2, "ep_size": 1, "tp_size": 2, "expert_tp_size": 2, "micro_batch_tokens": 300},
    "pipeline": {"num_ranks": 2, "ep_size": 1, "pp_size": 2, "micro_batch_tokens": 300},
}


@pytest.mark.parametrize(
    "name", ["one_rank", *(pytest.param(name, marks=pytest.mark.full) for name in list(LAYOUTS)[1:])]
)
def test_layouts_agree(name: str, client: TrainerClient, hf_checkpoint: Path, tmp_path: Path) -> None:
    """Loss, gradient and updated weights do not depend on how the model and the batch are split."""
    sequences = make_sequences(48, seed=3)
    sizes = dict(LAYOUTS[name])
    num_ranks = sizes.pop("num_ranks")
    with running_trainer(
        tmp_path / "run", hf_checkpoint, num_ranks=num_ranks, trainer=sizes, algorithm=ALGORITHM
    ) as other:
        assert other.client.weight_checksum() == client.weight_checksum()
        found = other.client.train_step(sequences)
        logprobs = other.client.logprobs(sequences)
        other.client.save_hf(str(tmp_path / "other"))
    expected = client.train_step(sequences)
    client.save_hf(str(tmp_path / "shared"))
    assert found.num_tokens == expected.num_tokens == sum(len(s.response_token_ids) for s in sequences)
    for field in ("loss", "grad_norm", "mean_abs_logprob_diff", "entropy", "kl", "clip_fraction"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field), abs=1e-5), field
    assert found.kl > 0
    left, right = (load_file(tmp_path / path / "model.safetensors") for path in ("other", "shared"))
    # Tensor parallelism sums inside a token, and Adam blows up rounding where a gradient is nearly zero.
    limit = 5e-5 if name == "tensor" else 1e-5
    assert max(float((left[key] - right[key]).abs().max()) for key in left) <= limit
    assert largest_difference(logprobs, [torch.tensor(row) for row in client.logprobs(sequences)]) <= 1e-4


def test_same_step_twice_gives_the_same_weights(client: TrainerClient, shared_trainer: SharedTrainer) -> None:
    sequences = make_sequences(32, seed=4)
    assert client.weight_checksum() == shared_trainer.start_checksum
    first = client.train_step(sequences)
    checksum = client.weight_checksum()
    assert checksum != shared_trainer.start_checksum
    client.load_checkpoint(str(shared_trainer.start))
    second = client.train_step(sequences)
    assert client.weight_checksum() == checksum
    assert (first.loss, first.grad_norm, first.kl) == (second.loss, second.grad_norm, second.kl)


def test_checkpoint_goes_on_where_it_was(client: TrainerClient, tmp_path: Path) -> None:
    client.train_step(make_sequences(16, seed=5))
    client.save_checkpoint(str(tmp_path / "middle"))
    num_steps = client.wait_ready(10.0).num_steps
    expected = client.train_step(make_sequences(16, seed=6))
    checksum = client.weight_checksum()
    client.train_step(make_sequences(16, seed=7))
    client.load_checkpoint(str(tmp_path / "middle"))
    assert client.wait_ready(10.0).num_steps == num_steps
    assert client.train_step(make_sequences(16, seed=6)).grad_norm == expected.grad_norm
    assert client.weight_checksum() == checksum


def test_supervised_steps_lower_the_loss(client: TrainerClient) -> None:
    sequences = make_sequences(32, seed=8)
    losses = [client.train_step(sequences, objective="nll", learning_rate=3e-3).loss for _ in range(8)]
    logprobs = [value for values in client.logprobs(sequences) for value in values]
    assert -sum(logprobs) / len(logprobs) < losses[-1] < losses[0] - 0.3


def test_policy_steps_raise_what_has_advantage(client: TrainerClient) -> None:
    """Rollout logprobs are the trainer's own, so nothing is clipped by importance."""
    raw = make_sequences(32, seed=9)
    sequences = [
        TrainSequence(
            prompt_token_ids=sequence.prompt_token_ids,
            response_token_ids=sequence.response_token_ids,
            rollout_logprobs=tuple(logprobs),
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, (sequence, logprobs) in enumerate(zip(raw, client.logprobs(raw), strict=True))
    ]
    stats = client.train_step(sequences)
    assert stats.num_optimizer_steps == 2
    assert stats.importance_clip_fraction == 0.0
    assert stats.mean_abs_logprob_diff < 1e-5
    assert stats.entropy == pytest.approx(
        -sum(sum(s.rollout_logprobs) for s in sequences) / stats.num_tokens, abs=0.5
    )
    gains = [
        sum(after) - sum(sequence.rollout_logprobs)
        for sequence, after in zip(sequences, client.logprobs(sequences), strict=True)
    ]
    assert sum(gains[1::2]) > 0 > sum(gains[::2])


def test_refused_commands_leave_the_trainer_as_it_was(client: TrainerClient, tmp_path: Path) -> None:
    good = make_sequences(4, seed=10)
    checksum = client.weight_checksum()
    too_long = TrainSequence(
        prompt_token_ids=(4,) * CONTEXT_TOKENS,
        response_token_ids=(5,),
        rollout_logprobs=(-1.0,),
        advantage=1.0,
    )
    outside = TrainSequence(
        prompt_token_ids=(4,), response_token_ids=(VOCAB_SIZE,), rollout_logprobs=(-1.0,), advantage=1.0
    )
    with pytest.raises(TrainerRefused, match="no sequences"):
        client.train_step([])
    with pytest.raises(TrainerRefused, match=r"sequence 4 of 5: 257 tokens exceed the context of 256"):
        client.train_step([*good, too_long])
    with pytest.raises(TrainerRefused, match="outside the vocabulary of 32"):
        client.logprobs([outside])
    with pytest.raises(TrainerRefused, match="no distributed checkpoint"):
        client.load_checkpoint(str(tmp_path))
    with pytest.raises(TrainerError, match=r"could not be written.*no checkpoint folder"):
        client.save_hf(str(tmp_path))
    with pytest.raises(TrainerError, match="server_info failed"):
        client.sync_weights(1, "http://127.0.0.1:9", deadline_s=5.0)
    assert client.weight_checksum() == checksum
    assert client.train_step(good).num_tokens == sum(len(s.response_token_ids) for s in good)
