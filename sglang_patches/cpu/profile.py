"""The CPU profile: flags and environment that SGLang needs on a CPU without AMX."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from sglang_patches.cpu import model_modules
from sglang_patches.serve_args import ServeArgs, has_flag

_STAND_INS = Path(__file__).parent / "stand_ins"
_DEFAULT_FLAGS = {
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
}
_DEFAULT_SWITCHES = ("--disable-cuda-graph",)
_OTHER_NAMES = {"--disable-cuda-graph": ("--cuda-graph-backend",)}


def fill_flags(args: ServeArgs) -> list[str]:
    """SGLang's flags with the profile's added where they are not given."""
    flags = list(args.sglang_flags)
    for name, value in _DEFAULT_FLAGS.items():
        if not has_flag(flags, name):
            flags += [name, value]
    for name in _DEFAULT_SWITCHES:
        if not has_flag(flags, name, *_OTHER_NAMES.get(name, ())):
            flags.append(name)
    return flags


def environment(args: ServeArgs, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables to set, given those inherited; one that the user set is kept."""
    cores = sorted(os.sched_getaffinity(0))
    defaults = {
        "SGLANG_CPU_OMP_THREADS_BIND": bind_ranks(cores, args.num_local_ranks),
        # Waking a second thread that waits passively takes longer than the arithmetic of a small model.
        "OMP_NUM_THREADS": "1",
        # Ranks that share cores must not spin while they wait, or they starve the rank that computes.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        # Compiling the seeded sampler takes longer on a CPU than a short run saves.
        "TORCH_COMPILE_DISABLE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": model_modules.unneeded(args),
    }
    variables = {name: value for name, value in defaults.items() if value and name not in inherited}
    variables["SGLANG_USE_CPU_ENGINE"] = "1"
    variables["PYTHONPATH"] = _python_path(inherited.get("PYTHONPATH", ""))
    return variables


def bind_ranks(cores: list[int], num_ranks: int) -> str:
    """SGLang's binding of ranks to cores: `0,1|2,3`; ranks in excess of the cores share them in turn."""
    num_each = max(1, len(cores) // num_ranks)
    groups = [
        [cores[(rank * num_each + index) % len(cores)] for index in range(num_each)]
        for rank in range(num_ranks)
    ]
    return "|".join(",".join(map(str, group)) for group in groups)


def _python_path(inherited: str) -> str:
    entries = [str(_STAND_INS / "site")]
    if not _can_import_kernels():
        entries.append(str(_STAND_INS / "kernels"))
    return os.pathsep.join([*entries, *filter(None, [inherited])])


def _can_import_kernels() -> bool:
    if importlib.util.find_spec("sgl_kernel") is None:
        return False
    # Found, but a CUDA build fails on a machine without its libraries: only trying tells.
    tried = subprocess.run([sys.executable, "-c", "import sgl_kernel"], capture_output=True, check=False)
    return tried.returncode == 0
