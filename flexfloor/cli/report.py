"""`flexfloor-report`: one HTML page about one or several runs, from what is in their directories."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flexfloor.report.page import render_page
from flexfloor.report.run_data import RunDirectoryError, read_runs

DEFAULT_STEPS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """2 for a directory that cannot be read or written, with one line about it."""
    options = _parser().parse_args(arguments)
    output: Path = options.output or options.runs[0] / "report.html"
    try:
        runs = read_runs(options.runs, most_steps=options.steps)
        text = render_page(runs)
        output.write_text(text, encoding="utf-8")
    except (RunDirectoryError, OSError) as error:
        print(f"flexfloor-report: {error}", file=sys.stderr)
        return 2
    print(f"{output} ({len(text) / 1e6:.1f} MB)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexfloor-report",
        description="Writes one self-contained HTML page about one or several runs.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directory; the first is compared with"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the first run directory)",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=DEFAULT_STEPS,
        metavar="N",
        help="most rollout steps of a run to read ledgers of and to draw (default: %(default)s)",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
