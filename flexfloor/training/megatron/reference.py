"""The reference model of the KL penalty: the weights at the start, kept on the host."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flexfloor.training.megatron.model import TrainedModel


class ReferenceWeights:
    """A copy of this rank's weights that can take the place of the trained ones for a forward pass."""

    def __init__(self, model: TrainedModel) -> None:
        self._parameters = [p for chunk in model.unwrapped for p in chunk.parameters()]
        self._reference = [p.detach().to("cpu", copy=True) for p in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the reference weights inside, and with its own again afterwards."""
        trained = [p.detach().to("cpu", copy=True) for p in self._parameters]
        self._put(self._reference)
        try:
            yield
        finally:
            self._put(trained)

    @torch.no_grad()
    def _put(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)
