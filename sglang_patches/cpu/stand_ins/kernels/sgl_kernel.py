"""Stands in for SGLang's compiled kernels where they cannot be imported.

SGLang imports many of their names on a CPU and calls none of them without AMX. A name that is called all the
same raises and says so.
"""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0"
__path__: list[str] = []


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing_kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} was called, but SGLang's compiled kernels cannot be imported on this machine "
            "and FlexFloor's CPU profile has only a stand-in for them"
        )

    return missing_kernel
