"""The importable stand-ins of the CPU profile, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from sglang_patches.cpu import profile

STAND_INS = Path(profile.__file__).parent / "stand_ins"


def run(script: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_kernels_import_and_raise_when_called() -> None:
    done = run(
        "from sgl_kernel import fused_experts_cpu as f; print('imported'); f(1)", STAND_INS / "kernels"
    )
    assert done.stdout == "imported\n"
    assert "sgl_kernel.fused_experts_cpu was called" in done.stderr


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one ran')")
    done = run("print('main')", STAND_INS / "site", tmp_path)
    assert done.stdout == "the other one ran\nmain\n", done.stderr


def make_torchvision(folder: Path, has_ops: bool) -> None:
    """A torch and a torchvision that fail as the real ones do when the operators did not load."""
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text("from . import extension, _meta_registrations")
    (folder / "torchvision" / "extension.py").write_text(f"def _has_ops(): return {has_ops}")
    (folder / "torchvision" / "_meta_registrations.py").write_text(
        "import torch.library\n"
        "known = [schema.partition('(')[0] for schema in torch.library.schemas]\n"
        "assert known == ['nms', 'qnms'], f'operators {known}'\n"
    )
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "library.py").write_text(
        "schemas = []\nclass Library:\n    def __init__(self, *_): pass\n    define = schemas.append\n"
    )


def test_operators_are_defined_when_torchvision_asks(tmp_path: Path) -> None:
    make_torchvision(tmp_path, has_ops=False)
    script = "import sys, torchvision; print('torch' in sys.modules)"
    assert "operators []" in run(script, tmp_path).stderr
    assert run(script, STAND_INS / "site", tmp_path).stdout == "True\n"
    assert run("import sys; print('torch' in sys.modules)", STAND_INS / "site", tmp_path).stdout == "False\n"


def test_loaded_operators_are_left_alone(tmp_path: Path) -> None:
    make_torchvision(tmp_path, has_ops=True)
    assert "operators []" in run("import torchvision", STAND_INS / "site", tmp_path).stderr
