"""One rank of the trainer: what each command does, on every rank in step."""

import datetime
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from flexfloor.config.schema import LossAgg
from flexfloor.training.checksum import WeightChecksum
from flexfloor.training.given import check_given, check_groups, in_request_order
from flexfloor.training.hf_folder import count_parameters, write_hf_folder
from flexfloor.training.launch import TrainerSpec
from flexfloor.training.loss import LossSums, TokenBatch, grpo_loss, nll_loss, token_weights
from flexfloor.training.megatron.batch import Microbatch, build_microbatch, with_given
from flexfloor.training.megatron.bridge import export_hf_weights
from flexfloor.training.megatron.checkpoint import load_checkpoint, save_checkpoint
from flexfloor.training.megatron.model import (
    TrainedModel,
    build_model,
    device_context,
    init_parallel,
    set_learning_rate,
)
from flexfloor.training.megatron.reference import ReferenceWeights
from flexfloor.training.megatron.step import (
    LossFunction,
    forward_logprobs,
    gather_logprobs,
    holds_losses,
    optimizer_step,
)
from flexfloor.training.messages import (
    GroupLogprobs,
    GroupLogprobsMsg,
    LogprobGroup,
    Objective,
    TrainerInfo,
    TrainStats,
)
from flexfloor.training.packing import check_sequences, num_input_tokens, plan_step, split_minibatches
from flexfloor.training.step_totals import StepTotals
from flexfloor.types import TrainSequence

IDLE_TIMEOUT = datetime.timedelta(days=30)


class TrainerEngine:
    """All ranks call the same methods with the same arguments at the same time."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.num_steps = 0
        init_parallel(spec)
        # Commands and small results go through the CPU, whatever the model's device. Ranks wait in it for the
        # next command, so it must outlast any rollout step.
        self.control_group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        with device_context(spec.device):
            self.model: TrainedModel = build_model(spec)
        self._reference = ReferenceWeights(self.model) if spec.algorithm.kl_coef else None

    @property
    def context_tokens(self) -> int:
        return min(self.spec.context_tokens, int(self.model.hf_config.max_position_embeddings))

    def info(self) -> TrainerInfo:
        return TrainerInfo(
            num_params=count_parameters(self.spec.checkpoint_path),
            num_ranks=dist.get_world_size(),
            dp_size=mpu.get_data_parallel_world_size(),
            context_tokens=self.context_tokens,
            vocab_size=int(self.model.hf_config.vocab_size),
            num_steps=self.num_steps,
        )

    def check(self, sequences: Sequence[TrainSequence], *, needs_logprobs: bool) -> None:
        """Raises SequenceError. Needs no other rank."""
        check_sequences(
            sequences,
            context_tokens=self.context_tokens,
            vocab_size=int(self.model.hf_config.vocab_size),
            needs_logprobs=needs_logprobs,
        )

    def check_given(self, sequences: Sequence[TrainSequence], weight_version: int | None) -> None:
        """Raises SequenceError for logprobs that a step must not take. Needs no other rank."""
        check_given(sequences, weight_version=weight_version, algorithm=self.spec.algorithm)

    def check_groups(self, request: GroupLogprobsMsg, weight_version: int | None) -> None:
        """Raises SequenceError. Needs no other rank."""
        check_groups(
            request.groups,
            asked_version=request.weight_version,
            weight_version=weight_version,
            needs_reference=request.needs_reference,
            has_reference=self._reference is not None,
        )
        self.check([one for group in request.groups for one in group.sequences], needs_logprobs=False)

    def train_step(
        self, sequences: Sequence[TrainSequence], objective: Objective, learning_rate: float | None
    ) -> TrainStats:
        """Optimizer steps over `sequences`; the same statistics on every rank."""
        started_at_s = time.perf_counter()
        rate = self.spec.trainer.learning_rate if learning_rate is None else learning_rate
        set_learning_rate(self.model.optimizer, rate)
        totals = StepTotals()
        logprob_seconds = 0.0
        with device_context(self.spec.device):
            if objective is Objective.nll:
                self._nll_step(sequences, totals)
            else:
                logprob_seconds = self._grpo_steps(sequences, totals)
        self.num_steps += totals.num_optimizer_steps
        summed = totals.as_tensor()
        dist.all_reduce(summed, group=self.control_group)
        return totals.stats(
            summed,
            learning_rate=rate,
            seconds=time.perf_counter() - started_at_s,
            logprob_seconds=logprob_seconds,
        )

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[list[float]]:
        """Of each response token, in the order of `sequences`; on rank 0, elsewhere empty."""
        with device_context(self.spec.device):
            batches = self._pack(sequences, [0.0] * len(sequences))
            outputs = forward_logprobs(self.model, batches)
        merged = gather_logprobs(batches, outputs, self.control_group)
        return [merged[index] for index in range(len(sequences))] if dist.get_rank() == 0 else []

    def group_logprobs(
        self, groups: Sequence[LogprobGroup], *, weight_version: int, needs_reference: bool
    ) -> GroupLogprobs:
        """What a `train_step` on these groups will need; nothing on ranks but 0."""
        started_at_s = time.perf_counter()
        starts = accumulate((len(group.sequences) for group in groups), initial=0)
        placed = list(zip(starts, groups, strict=False))
        reference: dict[int, list[float]] = {}
        with device_context(self.spec.device):
            old = self._by_group([(start, group) for start, group in placed if group.needs_old])
            if needs_reference:
                assert self._reference is not None, "refused before"
                with self._reference.in_place():
                    reference = self._by_group(placed)
        return GroupLogprobs(
            logprobs=in_request_order(groups, old, reference, weight_version),
            seconds=time.perf_counter() - started_at_s,
        )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name; all ranks must run it to its end together."""
        with device_context(self.spec.device), torch.no_grad():
            yield from export_hf_weights(self.model.bridge, self.model.chunks)

    def weight_checksum(self) -> str:
        checksum = WeightChecksum()
        for name, tensor in self.export():
            if dist.get_rank() == 0:
                checksum.add(name, tensor)
        return checksum.hexdigest()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint folder; rank 0 writes."""
        if dist.get_rank() == 0:
            write_hf_folder(self.export(), path, self.spec.checkpoint_path, self.spec.dtype)
        else:
            drain(self.export())

    def save_checkpoint(self, path: str) -> None:
        with device_context(self.spec.device):
            save_checkpoint(self.model, path, self.num_steps)

    def load_checkpoint(self, path: str) -> None:
        with device_context(self.spec.device):
            self.num_steps = load_checkpoint(self.model, path)

    def _grpo_steps(self, sequences: Sequence[TrainSequence], totals: StepTotals) -> float:
        """All optimizer steps of one rollout step; returns the seconds that went into logprobs before them.

        Old logprobs are those of the weights at its start. In the first optimizer step they are the current
        ones, so only the later steps' sequences need a forward pass of their own. With importance sampling
        off, the rollout's logprobs are taken as old, and no pass is needed. What was given is not computed.
        """
        algorithm = self.spec.algorithm
        blocks = split_minibatches(len(sequences), algorithm.num_minibatches)
        parts = [[sequences[index] for index in block] for block in blocks]
        steps = [self._pack(part, self._weights(part, algorithm.loss_agg)) for part in parts]
        logprob_seconds = 0.0
        if sequences[0].given is None:
            started_at_s = time.perf_counter()
            steps = self._with_logprobs(steps)
            logprob_seconds = time.perf_counter() - started_at_s
        else:
            steps = [
                self._take_given(batches, part, is_first=number == 0)
                for number, (batches, part) in enumerate(zip(steps, parts, strict=True))
            ]
        for number, batches in enumerate(steps):
            knows_old = number == 0 or algorithm.importance_cap is not None
            self._optimize(batches, self._grpo_loss, totals, knows_old=knows_old)
        return logprob_seconds

    def _with_logprobs(self, steps: list[list[Microbatch]]) -> list[list[Microbatch]]:
        """All microbatches of the optimizer steps with the old and reference logprobs that they need."""
        if self.spec.algorithm.importance_cap is not None:
            steps = [steps[0], *(self._with_old_logprobs(batches) for batches in steps[1:])]
        if self._reference is not None:
            with self._reference.in_place():
                steps = [self._with_reference_logprobs(batches) for batches in steps]
        return steps

    def _take_given(
        self, batches: list[Microbatch], part: Sequence[TrainSequence], *, is_first: bool
    ) -> list[Microbatch]:
        needs_old = not is_first and self.spec.algorithm.importance_cap is not None
        needs_reference = self._reference is not None
        return [
            with_given(batch, part, needs_old=needs_old, needs_reference=needs_reference) for batch in batches
        ]

    def _by_group(self, placed: Sequence[tuple[int, LogprobGroup]]) -> dict[int, list[float]]:
        """Logprobs by the weights in place, each group packed by itself; on rank 0, elsewhere empty.

        Args:
            placed: (index of the group's first sequence, group).
        """
        batches = [
            replace(batch, indices=tuple(start + index for index in batch.indices))
            for start, group in placed
            for batch in self._pack(group.sequences, [0.0] * len(group.sequences))
        ]
        if not batches:
            return {}
        return gather_logprobs(batches, forward_logprobs(self.model, batches), self.control_group)

    def _nll_step(self, sequences: Sequence[TrainSequence], totals: StepTotals) -> None:
        batches = self._pack(sequences, self._weights(sequences, LossAgg.token_mean))
        self._optimize(batches, _nll_loss, totals, knows_old=False)

    def _optimize(
        self, batches: list[Microbatch], loss_function: LossFunction, totals: StepTotals, *, knows_old: bool
    ) -> None:
        sums, grad_norm = optimizer_step(self.model, batches, loss_function)
        totals.add(sums if holds_losses() else [], grad_norm, knows_old=knows_old)

    def _grpo_loss(self, logprobs: Tensor, batch: Microbatch) -> LossSums:
        algorithm = self.spec.algorithm
        current, rollout = logprobs.detach(), batch.rollout_logprobs
        old = batch.old_logprobs
        if old is None:
            old = rollout if algorithm.importance_cap is None else current
        sums = grpo_loss(
            logprobs,
            TokenBatch(
                weights=batch.weights,
                advantages=batch.advantages,
                old_logprobs=old,
                rollout_logprobs=rollout,
                reference_logprobs=batch.reference_logprobs,
            ),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            importance_cap=algorithm.importance_cap,
            kl_coef=algorithm.kl_coef,
        )
        if algorithm.importance_cap is None:
            # Old was the rollout's own: the trainer's view is the current one, true before the first update.
            return replace(sums, abs_logprob_diff=(current - rollout).abs().sum())
        return sums

    def _weights(self, sequences: Sequence[TrainSequence], loss_agg: LossAgg) -> list[float]:
        lengths = [len(sequence.response_token_ids) for sequence in sequences]
        return token_weights(lengths, loss_agg, self.spec.max_response_tokens)

    def _pack(self, sequences: Sequence[TrainSequence], weights: Sequence[float]) -> list[Microbatch]:
        """This rank's microbatches of one optimizer step or forward pass."""
        plan = plan_step(
            [num_input_tokens(sequence) for sequence in sequences],
            mpu.get_data_parallel_world_size(),
            self.spec.trainer.micro_batch_tokens,
        )
        return [
            build_microbatch(
                indices,
                sequences,
                weights,
                tokens_multiple=self.spec.trainer.tp_size,
                device=self.model.device,
            )
            for indices in plan[mpu.get_data_parallel_rank()]
        ]

    def _with_old_logprobs(self, batches: list[Microbatch]) -> list[Microbatch]:
        outputs = forward_logprobs(self.model, batches)
        if not outputs:
            # A pipeline stage before the last, which never looks at the loss.
            return batches
        return [replace(batch, old_logprobs=out) for batch, out in zip(batches, outputs, strict=True)]

    def _with_reference_logprobs(self, batches: list[Microbatch]) -> list[Microbatch]:
        outputs = forward_logprobs(self.model, batches)
        if not outputs:
            return batches
        return [replace(batch, reference_logprobs=out) for batch, out in zip(batches, outputs, strict=True)]


def _nll_loss(logprobs: Tensor, batch: Microbatch) -> LossSums:
    return nll_loss(logprobs, batch.weights)


def drain(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Run an export to its end for the sake of the other ranks."""
    for _ in weights:
        pass
