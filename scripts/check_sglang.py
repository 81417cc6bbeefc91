#!/usr/bin/env python
"""Compare the hooks' targets with an SGLang: the installed one, an unpacked wheel, or a wheel.

    python scripts/check_sglang.py [--page] [PATH ...]   PATH: a wheel, or a folder that holds `sglang`

Imports nothing of SGLang. Says for each target whether it is what the catalog was checked with, and for each
name that our code imports whether it is there. Ends with status 1 when something changed, is missing or was
never checked. `--page` prints the comparison of several versions as the table of docs/sglang_versions.md.
"""

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sglang_patches import used_names, verify
from sglang_patches.catalog import PATCHES
from sglang_patches.used_names import UsedName
from sglang_patches.verify import RowReport, RowState

_STATES = ("same", "changed", "missing")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", nargs="*", type=Path, help="wheels or folders (default: installed)")
    parser.add_argument("--page", action="store_true", help="print a table of targets and versions")
    options = parser.parse_args(argv)
    try:
        checked = [check(path) for path in options.path or [verify.installed_root()]]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"check_sglang: {error}", file=sys.stderr)
        return 2
    if options.page:
        print(page(checked))
        return 0
    return max([report(*one) for one in checked])


def check(path: Path) -> tuple[str, list[RowReport], list[UsedName]]:
    """Version, one report per row, and the names that are missing."""
    with unpacked(path) as root:
        version = verify.installed_version(root)
        return version, verify.check(PATCHES, root, version), used_names.missing_names(root)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder itself, or one with a wheel's Python sources and metadata for the length of the block."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(path) as wheel:
            sources = [name for name in wheel.namelist() if name.endswith((".py", "METADATA"))]
            wheel.extractall(folder, sources)
        yield Path(folder)


def report(version: str, rows: Sequence[RowReport], missing: Sequence[UsedName]) -> int:
    for row in rows:
        print(row)
    for used in missing:
        print(f"{'no such name':<15} {used} (used by sglang_patches/{used.where})")
    num_bad = sum(row.state is not RowState.ok for row in rows) + len(missing)
    print(f"SGLang {version}: {len(rows)} hooks, {num_bad} to look at")
    return 1 if num_bad else 0


def page(checked: Sequence[tuple[str, Sequence[RowReport], Sequence[UsedName]]]) -> str:
    """A row per target: same as the catalog's, changed, or missing, in each version."""
    columns = [_cells(rows) for _, rows, _ in checked]
    counts = [" / ".join(str(list(column.values()).count(state)) for state in _STATES) for column in columns]
    lines = [
        "| target | " + " | ".join(version for version, _, _ in checked) + " |",
        "|---|" + "---|" * len(checked),
        f"| **{' / '.join(_STATES)}** | {' | '.join(counts)} |",
    ]
    for target in columns[0]:
        cells = [column[target] for column in columns]
        lines.append(f"| `{target.removeprefix('sglang.srt.')}` | {' | '.join(cells)} |")
    lacking = [{str(used) for used in missing} for _, _, missing in checked]
    for name in sorted(set().union(*lacking)):
        cells = ["missing" if name in names else "there" for names in lacking]
        lines.append(f"| name `{name.removeprefix('sglang.srt.')}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(rows: Sequence[RowReport]) -> dict[str, str]:
    """By target, once each, in the order of the catalog."""
    cells: dict[str, str] = {}
    for patch, row in zip(PATCHES, rows, strict=True):
        same = row.found_digest in patch.checked.values()
        cells[patch.target] = "missing" if row.found_digest is None else "same" if same else "changed"
    return cells


if __name__ == "__main__":
    raise SystemExit(main())
