#!/usr/bin/env python
"""Compare the hooks' targets with an SGLang: the installed one, or an unpacked wheel.

    python scripts/check_sglang.py [FOLDER]      FOLDER holds the folder `sglang`

Imports nothing of SGLang. Ends with status 1 when a target changed, is missing or was never checked.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang_patches import verify
from sglang_patches.catalog import PATCHES


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, help="an unpacked wheel (default: the installed one)")
    folder = parser.parse_args(argv).folder or verify.installed_root()
    version = verify.installed_version(folder)
    reports = verify.check(PATCHES, folder, version)
    for report in reports:
        print(report)
    num_bad = sum(report.state is not verify.RowState.ok for report in reports)
    print(f"SGLang {version}: {len(reports)} hooks, {num_bad} to look at")
    return 1 if num_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
