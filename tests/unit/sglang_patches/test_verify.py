"""Digests of source text, without importing it."""

from pathlib import Path

import pytest

from sglang_patches import verify
from sglang_patches.patch import Patch
from sglang_patches.verify import RowState

SOURCE = """raise RuntimeError("must not be imported")

class Worker:
    @staticmethod
    def step(count):
        return count + 1

    async def drain(self): ...


def run(): ...
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "srt" / "worker.py").write_text(SOURCE)
    (tmp_path / "sglang-1.2.3.dist-info").mkdir()
    return tmp_path


def edit(root: Path, old: str, new: str) -> None:
    file = root / "sglang" / "srt" / "worker.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def row(target: str, **checked: str) -> Patch:
    return Patch(
        target=target, hook="worker:f", hook_type="after", process="scheduler", why="w", upstream="u",
        remove_when="r", checked=checked,
    )  # fmt: skip


STEP = "sglang.srt.worker.Worker.step"


def test_a_digest_follows_its_target_and_nothing_else(root: Path) -> None:
    digest = verify.digest_of(STEP, root)
    verify._parsed.cache_clear()
    edit(root, "def run(): ...", "def run():\n    return 2")
    assert verify.digest_of(STEP, root) == digest
    verify._parsed.cache_clear()
    edit(root, "count + 1", "count + 2")
    assert verify.digest_of(STEP, root) not in (digest, None)


def test_a_decorator_belongs_to_its_target(root: Path) -> None:
    digest = verify.digest_of(STEP, root)
    verify._parsed.cache_clear()
    edit(root, "@staticmethod", "@classmethod")
    assert verify.digest_of(STEP, root) != digest


@pytest.mark.parametrize("name", ["Worker.gone", "gone", "Worker.step.inner"])
def test_a_missing_target_has_no_digest(root: Path, name: str) -> None:
    assert verify.digest_of(f"sglang.srt.worker.{name}", root) is None
    assert verify.digest_of("sglang.srt.nowhere.run", root) is None


def test_states_of_rows(root: Path) -> None:
    digest = verify.digest_of(STEP, root)
    assert digest is not None
    rows = [
        row(STEP, **{"1.2.3": digest}),
        row(STEP, **{"1.2.3": "000000000000"}),
        row(STEP, **{"1.2.2": digest}),
        row("sglang.srt.worker.gone", **{"1.2.3": digest}),
    ]
    states = [report.state for report in verify.check(rows, root, verify.installed_version(root))]
    assert states == [RowState.ok, RowState.changed, RowState.unknown_version, RowState.missing]


def test_a_folder_without_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no SGLang version"):
        verify.installed_version(tmp_path)
