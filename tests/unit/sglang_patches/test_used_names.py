"""Names of SGLang that our code imports, and the command that compares versions."""

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from sglang_patches import used_names, verify
from sglang_patches.catalog import PATCHES
from sglang_patches.used_names import UsedName

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_sglang.py"

MODULE = """
from os.path import join as joined
import json
try:
    import fast
except ImportError:
    slow = 1
from sglang.more import *

def run(): inner = 2
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "worker.py").write_text(MODULE)
    (tmp_path / "sglang" / "more.py").write_text("class Starred: ...")
    (tmp_path / "sglang-1.2.3.dist-info").mkdir()
    (tmp_path / "sglang-1.2.3.dist-info" / "METADATA").write_text("Name: sglang\n")
    return tmp_path


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sglang", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["joined", "json", "fast", "slow", "Starred", "run", ""])
def test_a_name_is_there_however_the_module_binds_it(root: Path, name: str) -> None:
    assert used_names.has_name(root, "sglang.srt.worker", name)


@pytest.mark.parametrize("name", ["inner", "join", "gone"])
def test_a_name_that_an_import_would_not_find(root: Path, name: str) -> None:
    assert not used_names.has_name(root, "sglang.srt.worker", name)


def test_a_submodule_is_a_name_of_its_package(root: Path) -> None:
    assert used_names.has_name(root, "sglang.srt", "worker")
    assert not used_names.has_name(root, "sglang.gone")


def test_every_import_of_sglang_is_found() -> None:
    used = {str(one) for one in used_names.used_names()}
    assert "sglang.srt.runtime_context:get_parallel" in used
    assert "sglang.srt.managers.detokenizer_manager" in used


def test_imports_of_our_own_package_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text("from sglang_patches import verify\nfrom sglang.srt.a import b\n")
    assert used_names.used_names(tmp_path) == (UsedName("sglang.srt.a", "b", "hook.py"),)


def test_a_wheel_is_read_like_a_folder(
    root: Path, tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "sglang-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in [*root.rglob("*.py"), *root.rglob("METADATA")]:
            archive.write(file, file.relative_to(root))
    assert script.main([str(wheel)]) == 1
    from_wheel = capsys.readouterr().out
    assert script.main([str(root)]) == 1
    assert capsys.readouterr().out == from_wheel
    assert from_wheel.splitlines()[-1].startswith("SGLang 1.2.3: ")
    assert "no such name    sglang.srt.runtime_context:get_parallel" in from_wheel


def test_a_path_that_is_no_sglang_is_named(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(tmp_path)]) == 2
    assert f"no SGLang version found under {tmp_path}" in capsys.readouterr().err
    assert script.main([str(tmp_path / "gone.whl")]) == 2


def test_the_installed_sglang_passes_and_the_table_marks_what_differs(
    root: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = script.check(verify.installed_root())
    assert script.report(*installed) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("hooks, 0 to look at")
    lines = script.page([installed, script.check(root)]).splitlines()
    assert lines[0] == f"| target | {verify.installed_version(verify.installed_root())} | 1.2.3 |"
    assert "| `managers.scheduler.Scheduler.run_batch` | same | missing |" in lines
    num_targets = len({patch.target for patch in PATCHES})
    assert f"| **same / changed / missing** | {num_targets} / 0 / 0 | 0 / 0 / {num_targets} |" in lines
    assert "| name `runtime_context:get_parallel` | there | missing |" in lines
    assert len(lines) == len(set(lines))


def test_the_page_of_versions_has_every_target() -> None:
    page = (SCRIPT.parents[1] / "docs" / "sglang_versions.md").read_text()
    targets = {patch.target.removeprefix("sglang.srt.") for patch in PATCHES}
    missing = sorted(target for target in targets if f"| `{target}` |" not in page)
    assert not missing, "new hooks: make the page's table again, see `--page` of scripts/check_sglang.py"
