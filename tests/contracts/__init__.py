"""What foreign drivers promise, as read from their sources: facts in JSON files, and the readers of them.

A reader takes source text only and imports nothing of the package. `scripts/check_foreign.py` reads the facts
of a wheel or a checkout anew and compares.
"""

import json
from pathlib import Path
from typing import Any

Facts = dict[str, Any]


def recorded(name: str) -> Facts:
    """The facts in `NAME.json`."""
    facts: Facts = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
    return facts
