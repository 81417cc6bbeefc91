"""Hooks on sglang.srt.distributed.device_communicators.pynccl_wrapper."""

from typing import Any


def find_no_library(_library: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `NCCLLibrary.__init__`; its caller takes any error for a machine without NCCL."""
    raise OSError("NCCL is of no use without a GPU")
