"""Renders the catalog as PATCHES.md. `python -m sglang_patches.patches_page` writes the file."""

from collections.abc import Sequence
from pathlib import Path

from sglang_patches.catalog import PATCHES
from sglang_patches.patch import Patch

PAGE = Path(__file__).with_name("PATCHES.md")

_HEAD = """# What FlexFloor changes in SGLang

Generated from `catalog.py` and `rows/` by `python -m sglang_patches.patches_page`; edit those, not this page.
`scripts/check_sglang.py` compares the targets with any SGLang.

| target | hook | when | why | remove when | checked |
|---|---|---|---|---|---|
"""


def render(patches: Sequence[Patch]) -> str:
    """The page's text."""
    return _HEAD + "".join(map(_row, patches))


def _row(patch: Patch) -> str:
    checked = ", ".join(f"{version} `{digest}`" for version, digest in patch.checked.items())
    hook = f"{patch.hook_type} `{patch.hook}` ({patch.process})"
    return f"| `{patch.target}` | {hook} | {_when(patch)} | {patch.why} | {patch.remove_when} | {checked} |\n"


def _when(patch: Patch) -> str:
    conditions = [
        f"device {patch.device}" if patch.device != "any" else "",
        f"collectives {patch.collectives}" if patch.collectives != "any" else "",
        f"membership {patch.membership}" if patch.membership != "any" else "",
        f"iteration log {patch.iteration_log}" if patch.iteration_log != "any" else "",
    ]
    return ", ".join(filter(None, conditions)) or "always"


if __name__ == "__main__":
    PAGE.write_text(render(PATCHES), encoding="ascii")
