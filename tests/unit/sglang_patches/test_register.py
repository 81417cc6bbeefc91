"""Inert unless asked, and no start when the hooks cannot be installed exactly as checked.

A copy of SGLang's sources stands in for SGLang: its hook registry is the real one and needs nothing else.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from sglang_patches import CONFIG_ENV, verify
from sglang_patches.catalog import PATCHES

REGISTRY = "sglang/srt/plugins/hook_registry.py"
RUN_BATCH = "self.forward_ct += 1"


def run(script: str, python_path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != CONFIG_ENV}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of SGLang that the CUDA rows look at, as a package of their own."""
    installed, copy = verify.installed_root(), tmp_path_factory.mktemp("sglang")
    files = {REGISTRY, *(_file_of(patch.target) for patch in PATCHES)}
    for file in files:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, copy / file)
    for folder in {
        parent for file in files for parent in (copy / file).parents if parent.is_relative_to(copy)
    }:
        if folder != copy:
            (folder / "__init__.py").touch()
    (copy / f"sglang-{verify.installed_version(installed)}.dist-info").mkdir()
    return copy


def _file_of(target: str) -> str:
    parts = target.split(".")
    installed = verify.installed_root()
    return next(
        file
        for count in range(len(parts) - 1, 0, -1)
        if (installed / (file := "/".join(parts[:count]) + ".py")).is_file()
    )


@pytest.fixture
def tampered(sources: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "sglang"
    shutil.copytree(sources, copy)
    return copy


def config_file(tmp_path: Path, **entries: object) -> str:
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps({"device": "cuda", **entries}))
    return str(path)


REGISTER = "import sglang_patches; sglang_patches.register()"


def test_sglang_finds_the_entry_point() -> None:
    (entry,) = [point for point in entry_points(group="sglang.srt.plugins") if point.name == "flexfloor"]
    assert entry.value == "sglang_patches:register"


def test_nothing_happens_unless_enabled(sources: Path) -> None:
    script = (
        f"{REGISTER}; import sys;"
        "print(sorted(name for name in sys.modules if name.startswith('sglang')));"
        "from sglang.srt.plugins.hook_registry import HookRegistry;"
        "print(dict(HookRegistry._hooks), HookRegistry._patched)"
    )
    done = run(script, sources)
    assert done.stdout.splitlines() == ["['sglang_patches']", "{} set()"], done.stderr


def test_changed_source_is_refused(tampered: Path, tmp_path: Path) -> None:
    scheduler = tampered / "sglang/srt/managers/scheduler.py"
    assert RUN_BATCH in scheduler.read_text()
    scheduler.write_text(scheduler.read_text().replace(RUN_BATCH, "self.forward_ct += 2"))
    done = run(REGISTER, tampered, **{CONFIG_ENV: config_file(tmp_path)})
    assert done.returncode == 1
    assert "flexfloor refuses to start" in done.stderr
    assert "changed         sglang.srt.managers.scheduler.Scheduler.run_batch" in done.stderr
    assert "get_internal_state" not in done.stderr


def test_unknown_version_is_refused(tampered: Path, tmp_path: Path) -> None:
    (old,) = tampered.glob("sglang-*.dist-info")
    old.rename(tampered / "sglang-9.9.9.dist-info")
    done = run(REGISTER, tampered, **{CONFIG_ENV: config_file(tmp_path)})
    assert done.returncode == 1
    assert "SGLang 9.9.9 differs" in done.stderr
    assert "unknown_version" in done.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, "No such file"), ("{", "Expecting"), ('{"devise": "cpu"}', "devise"), ("[]", "not a mapping")],
)
def test_unreadable_configuration_is_refused(sources: Path, tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "plugin.json"
    if text is not None:
        path.write_text(text)
    done = run(REGISTER, sources, **{CONFIG_ENV: str(path)})
    assert done.returncode == 1
    assert "flexfloor refuses to start: plugin configuration" in done.stderr
    assert problem in done.stderr


def test_a_hook_that_does_not_apply_is_refused(sources: Path) -> None:
    script = """
from dataclasses import replace
from sglang_patches import plugin
from sglang_patches.catalog import PATCHES
plugin.install([replace(PATCHES[0], target="sglang.srt.plugins.hook_registry.HookRegistry.gone")])
"""
    done = run(script, sources)
    assert done.returncode == 1
    assert "did not apply the hooks on sglang.srt.plugins.hook_registry.HookRegistry.gone" in done.stderr


def test_a_hook_that_applies_runs(tampered: Path) -> None:
    (tampered / "sglang" / "loop.py").write_text(
        "class Loop:\n    def run_batch(self, batch):\n        return batch\n"
    )
    script = """
from dataclasses import replace
from types import SimpleNamespace
from sglang_patches import plugin
from sglang_patches.catalog import PATCHES
from sglang_patches.counters import IterationCounters
from sglang.loop import Loop
plugin.install([replace(PATCHES[0], target="sglang.loop.Loop.run_batch")])
loop = Loop()
for is_idle, is_extend in ((False, True), (False, False), (True, False)):
    mode = SimpleNamespace(is_idle=lambda v=is_idle: v, is_extend=lambda v=is_extend: v)
    loop.run_batch(SimpleNamespace(forward_mode=mode, is_extend_in_batch=False))
print(IterationCounters.of(loop).as_dict())
"""
    done = run(script, tampered)
    expected = {"num_iterations": 3, "num_prefill_iterations": 1, "num_idle_iterations": 1}
    assert done.stdout.strip() == str(expected), done.stderr
