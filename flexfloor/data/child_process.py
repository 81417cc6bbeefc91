"""How this package starts Python children; multiprocessing's would import the driver's main module again."""

import os
import sys


def child_command(module: str, *arguments: str) -> list[str]:
    """Run a module of this package with the same interpreter."""
    # -P: a file in the working directory must not shadow a module. -u: what was printed must survive a kill.
    return [sys.executable, "-P", "-u", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Same import path, and a fixed hash seed, since what some tasks make depends on the order of sets."""
    search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": search_path, "PYTHONHASHSEED": "0"}
