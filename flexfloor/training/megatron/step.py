"""Forward passes and optimizer steps over microbatches, on Megatron-Core's own schedules."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from flexfloor.training.loss import LossSums
from flexfloor.training.megatron.batch import Microbatch
from flexfloor.training.megatron.model import TrainedModel

LossFunction = Callable[[Tensor, Microbatch], LossSums]
"""(logprobs of the response tokens with gradient, their microbatch) -> sums."""


def holds_losses() -> bool:
    """Whether this rank sees the model's output, and is the only tensor-parallel rank to report it."""
    last_stage: bool = mpu.is_pipeline_last_stage(ignore_virtual=True)
    return last_stage and mpu.get_tensor_model_parallel_rank() == 0


def forward_logprobs(model: TrainedModel, batches: Sequence[Microbatch]) -> list[Tensor]:
    """Logprobs of each microbatch's response tokens, `# [num_response_tokens]`, without gradient.

    Collective. Empty on ranks that are not of the last pipeline stage.
    """

    def keep(logprobs: Tensor, batch: Microbatch) -> Tensor:
        return logprobs.detach()

    with torch.no_grad():
        outputs: list[Tensor] = _run(model, batches, keep, forward_only=True)
    return outputs


def gather_logprobs(
    batches: Sequence[Microbatch], outputs: Sequence[Tensor], group: dist.ProcessGroup
) -> dict[int, list[float]]:
    """By the sequences' indices, what `forward_logprobs` gave all ranks; on rank 0, elsewhere empty.

    Collective over `group`, which spans all ranks.
    """
    mine: dict[int, list[float]] = {}
    if holds_losses():
        for batch, output in zip(batches, outputs, strict=True):
            pieces = torch.split(output.float().cpu(), list(batch.response_lengths))
            mine.update(zip(batch.indices, (piece.tolist() for piece in pieces), strict=True))
    gathered: list[dict[int, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(mine, gathered if dist.get_rank() == 0 else None, group=group)
    return {index: values for part in gathered for index, values in part.items()}


def optimizer_step(
    model: TrainedModel, batches: Sequence[Microbatch], loss_function: LossFunction
) -> tuple[list[LossSums], float]:
    """One update of the weights from all microbatches of all ranks.

    Collective. Returns the sums of this rank's microbatches (empty unless it is of the last pipeline stage),
    and the norm of the whole gradient before clipping.
    """
    chunk: Any
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()
    sums: list[LossSums] = _run(model, batches, loss_function, forward_only=False)
    succeeded, grad_norm, _ = model.optimizer.step()
    assert succeeded, "the optimizer skipped a step, which only a loss scaler may do, and there is none"
    norm = float(grad_norm or 0.0)
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}; the weights are spoilt by now")
    return sums, norm


def _run(
    model: TrainedModel,
    batches: Sequence[Microbatch],
    function: Callable[[Tensor, Microbatch], Any],
    forward_only: bool,
) -> list[Any]:
    # The schedule divides gradients by the token count that the loss reports and leaves them alone when it is
    # zero. Our weights hold the normaliser already, so zero is what we report.
    no_tokens = torch.zeros((), dtype=torch.int, device=model.device)

    def forward_step(iterator: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        batch = next(iterator)
        output = chunk(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            labels=batch.labels,
            packed_seq_params=batch.packed,
        )

        def loss(output: Tensor, non_loss_data: bool = False) -> Any:
            result = function(-output.flatten()[batch.response_places], batch)
            return result if non_loss_data else (result.loss, no_tokens, result)

        return output, loss

    outputs: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model.chunks,
        num_microbatches=len(batches),
        seq_length=max(batch.input_ids.shape[1] for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return outputs
