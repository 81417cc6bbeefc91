#!/usr/bin/env python
"""Compare what is recorded of verl and slime with their real sources.

    python scripts/check_foreign.py verl PATH     PATH: a wheel, or a folder that holds the folder `verl`
    python scripts/check_foreign.py slime PATH    PATH: a checkout of slime

For example: pip download verl==0.9.1 --no-deps. Imports nothing of the packages and needs no network.
Ends with status 1 and names each fact that differs. `--record` writes the facts of verl instead.
"""

import argparse
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.contracts import Facts, recorded, slime_facts, verl_facts
from tests.contracts.sources import Sources

READERS = {"verl": (verl_facts.read, "verl-0.9.1"), "slime": (slime_facts.read, "slime-624b824a8")}
_ABOUT = ("package", "read_from")
"""Keys of a record that say where it comes from."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", choices=sorted(READERS))
    parser.add_argument("path", type=Path)
    parser.add_argument("--record", action="store_true", help="write the record instead of comparing")
    options = parser.parse_args(argv)
    read, name = READERS[options.package]
    try:
        found = read(Sources(options.path))
    except (OSError, LookupError, zipfile.BadZipFile) as error:
        print(f"check_foreign: {options.package}: {error}", file=sys.stderr)
        return 1
    if options.record:
        record(name, found)
        return 0
    return compare(options.package, recorded(name), found)


def compare(package: str, expected: Facts, found: Facts) -> int:
    names = sorted(set(expected) - set(_ABOUT) | set(found))
    num_bad = 0
    for name in names:
        if expected.get(name) == found.get(name):
            print(f"ok        {name}")
            continue
        num_bad += 1
        print(f"differs   {name}\n  recorded {expected.get(name)}\n  found    {found.get(name)}")
    print(f"{package}: {len(names)} facts, {num_bad} to look at")
    return 1 if num_bad else 0


def record(name: str, facts: Facts) -> None:
    file = Path(__file__).parents[1] / "tests" / "contracts" / f"{name}.json"
    about = {key: recorded(name)[key] for key in _ABOUT} if file.exists() else {}
    file.write_text(json.dumps({**about, **facts}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
