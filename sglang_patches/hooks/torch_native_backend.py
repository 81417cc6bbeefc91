"""Hooks on sglang.srt.layers.attention.torch_native_backend."""

from typing import Any


def add_seq_len_fill_value(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `TorchNativeAttnBackend.__init__`."""
    # On the object: the class has no such method that a hook could wrap. A padded row attends one token.
    backend.get_cpu_graph_seq_len_fill_value = lambda: 1
