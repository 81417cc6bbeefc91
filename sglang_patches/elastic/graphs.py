"""CUDA graphs per member set. Not yet run on a GPU.

A captured graph holds the communicator of its group, buffers and token counts as long as the group is wide,
and the addresses of weights and KV. So every member set has graphs of its own:

    full set        what SGLang captured at its start, decode and prefill
    prepared set    decode graphs captured at our start, under the set's own group; prefill without graphs
    any other set   no graphs: SGLang's eager path

Rule 1: capturing is collective over the members of a set. All of them capture the same sets in one order.
Rule 2: a runner is captured once and kept: expert slots, KV pool and expert maps never change their address.
Rule 3: an attention backend belongs to one runner. A second runner on the same backend would put new buffers
in the place of those that the first one's graphs read.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

Members = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Runners:
    """What SGLang's model runner executes with in one member set."""

    decode: Any
    """None: decode without graphs."""
    prefill: Any


class GraphSets:
    """The runners of one rank by member set. Without CUDA graphs nothing ever changes."""

    def __init__(self, model_runner: Any, full: Members, capture: Callable[[Any], Any] | None = None) -> None:
        self._model_runner = model_runner
        self._capture = capture or capture_decode
        launched = Runners(
            getattr(model_runner, "decode_cuda_graph_runner", None),
            getattr(model_runner, "prefill_cuda_graph_runner", None),
        )
        eager = getattr(model_runner, "eager_runner", None)
        self._eager = Runners(None, eager)
        self._runners = {full: launched}
        self._said: set[Members] = set()
        self._is_cpu = model_runner.device == "cpu"
        self.has_decode_graphs = not self._is_cpu and launched.decode not in (None, eager)
        """Whether prepared sets get graphs too."""

    def capture(self, members: Members) -> None:
        """Capture decode graphs for the group in force, which is that of `members`."""
        started_s = time.monotonic()
        decode = self._capture(self._model_runner)
        self._runners[members] = Runners(decode, self._eager.prefill)
        took_s = time.monotonic() - started_s
        logger.info("flexfloor captured CUDA graphs members=%s took_s=%.1f", members, took_s)

    def settle(self) -> None:
        """Wait for the iteration that still runs on the device: it reads the expert maps of the old set."""
        if not self._is_cpu:
            synchronize(self._model_runner.device)

    def install(self, members: Members) -> None:
        """Execute with the runners of this set from now on."""
        if self._is_cpu:
            return
        runners = self._runners.get(members, self._eager)
        if self.has_decode_graphs and runners.decode is None and members not in self._said:
            self._said.add(members)
            logger.warning(
                "flexfloor members=%s decode without CUDA graphs: --flexfloor-member-sets", members
            )
        self._model_runner.decode_cuda_graph_runner = runners.decode
        self._model_runner.prefill_cuda_graph_runner = runners.prefill


def capture_decode(model_runner: Any) -> Any:
    """A decode graph runner for the group that SGLang works in now."""
    shares_workspace = model_runner.init_new_workspace
    try:
        attention = model_runner._get_attention_backend(init_new_workspace=False)
    finally:
        model_runner.init_new_workspace = shares_workspace
    # As SGLang does with the backends that it builds itself.
    model_runner.kv_index_translator.bind_and_verify_backends([attention])
    attention.validate_elastic_cuda_graph_recapture()
    runner = model_runner._decode_cuda_graph_runner_cls()(model_runner, attn_backend=attention)
    synchronize(model_runner.device)
    return runner


def synchronize(device: str) -> None:
    """Wait for everything that this rank has launched on its device."""
    import torch

    torch.get_device_module(device).synchronize()
