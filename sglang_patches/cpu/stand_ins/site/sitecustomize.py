"""Lets torchvision be imported beside a torch that its compiled operators do not fit.

torchvision then registers fake implementations for two operators that nobody has defined, and fails. Their
definitions are added at the moment torchvision asks for that module, and only if its operators did not load.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # a torch.library.Library undoes its definitions when it is collected


class _DefineMissingOperators(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            if not sys.modules["torchvision.extension"]._has_ops():
                _define_schemas()
        return None


def _define_schemas() -> None:
    from torch import library as torch_library

    library: Any = torch_library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _run_next_sitecustomize() -> None:
    """Python runs only the first `sitecustomize` on the path: this one passes on to the one that it hides."""
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _DefineMissingOperators())
_run_next_sitecustomize()
