"""Lets torchvision be imported beside a torch that its compiled operators were not built for.

The package index offers torchvision for CUDA only. Beside a CPU build of torch its operators do not register,
and it fails on import, and with it transformers' models, though nothing here ever runs one of its operators.
"""

from typing import Any

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# Definitions vanish with the library object that made them.
_libraries: list[Any] = []


def define_missing() -> None:
    """Call before the first import of torchvision. Does nothing beside a CUDA build, or when repeated."""
    if torch.version.cuda is not None or _libraries:
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)
    _libraries.append(library)
