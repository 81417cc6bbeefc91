"""`torch.cuda` for code that never asks whether there is a GPU."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class CudaIsCpu(TorchFunctionMode):
    """Inside it, whatever is asked for on "cuda" lands on the CPU. Holds for the thread that entered it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by the CUDA spelling of their type and assert on it.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class NullStream:
    """A stream or event on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "NullStream":
        return self

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class NullEvent(NullStream):
    """torch.compile's tables refuse one object under two names of torch.cuda, hence a class of its own."""


def _nothing() -> Callable[..., None]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    return nothing


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def install() -> None:
    """Replace what Megatron-Core reads of `torch.cuda`. There is one device, the CPU, and one stream."""
    stream = NullStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: CPU,
        "set_device": _nothing(),
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        "Stream": NullStream,
        "Event": NullEvent,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "manual_seed": _manual_seed,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
