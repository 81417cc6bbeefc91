"""Compares the installed source of SGLang with what the catalog was checked with.

Rule: reads text only and imports nothing of SGLang, so that it runs without a GPU, on any unpacked wheel.
"""

import ast
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from sglang_patches.patch import Patch

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class RowState(StrEnum):
    """How a row's target compares with what the row was checked with."""

    ok = "ok"
    changed = "changed"
    """The target's source text differs from the one checked."""
    missing = "missing"
    """There is no such module or definition."""
    unknown_version = "unknown_version"
    """The row has no digest for this version of SGLang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """One row of the catalog against one SGLang."""

    target: str
    state: RowState
    expected_digest: str | None
    found_digest: str | None

    def __str__(self) -> str:
        return f"{self.state:<15} {self.target} (checked {self.expected_digest}, found {self.found_digest})"


def installed_root() -> Path:
    """Folder that holds the installed `sglang` package. Raises ModuleNotFoundError when there is none."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed in this environment")
    return Path(next(iter(spec.submodule_search_locations))).parent


def installed_version(root: Path) -> str:
    """Version of the SGLang under `root`, from its metadata folder or its version file.

    Raises ValueError when neither names one.
    """
    for metadata in sorted(root.glob("sglang-*.dist-info")):
        return metadata.name.removeprefix("sglang-").removesuffix(".dist-info")
    version_file = root / "sglang" / "_version.py"
    text = version_file.read_text(encoding="utf-8") if version_file.exists() else ""
    found = re.search(r"^(?:__version__ = )?version = [\"']([^\"']+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no SGLang version found under {root}")
    return found.group(1)


def digest_of(target: str, root: Path) -> str | None:
    """First 12 hex digits of the SHA-256 of the target's source, decorators included; None if missing."""
    parts = target.split(".")
    for num_module_parts in range(len(parts) - 1, 0, -1):
        module_file = _module_file(root, parts[:num_module_parts])
        if module_file is not None:
            return _digest_in(module_file, parts[num_module_parts:])
    return None


def check(patches: Iterable[Patch], root: Path, version: str) -> list[RowReport]:
    """One report per row, in the order of the rows."""
    return [_check_row(patch, root, version) for patch in patches]


def _check_row(patch: Patch, root: Path, version: str) -> RowReport:
    expected = patch.checked.get(version)
    found = digest_of(patch.target, root)
    if found is None:
        state = RowState.missing
    elif expected is None:
        state = RowState.unknown_version
    else:
        state = RowState.ok if found == expected else RowState.changed
    return RowReport(target=patch.target, state=state, expected_digest=expected, found_digest=found)


def _module_file(root: Path, parts: list[str]) -> Path | None:
    base = root.joinpath(*parts)
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@lru_cache(maxsize=64)
def _parsed(module_file: Path) -> tuple[ast.Module, list[str]]:
    text = module_file.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def _digest_in(module_file: Path, names: list[str]) -> str | None:
    tree, lines = _parsed(module_file)
    scope: ast.Module | Definition = tree
    for name in names:
        found = _definition(scope, name)
        if found is None:
            return None
        scope = found
    assert not isinstance(scope, ast.Module)
    first_line = min([scope.lineno, *(node.lineno for node in scope.decorator_list)])
    text = "\n".join(lines[first_line - 1 : scope.end_lineno])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _definition(scope: ast.Module | Definition, name: str) -> Definition | None:
    for node in scope.body:
        if isinstance(node, Definition) and node.name == name:
            return node
    return None
