"""What the docs show is true: commands compose, scripts, links and rooms exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.config.rules import validate

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])


def shell_lines(page: Path) -> Iterator[str]:
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines():
            command = line.split("  #")[0].strip()
            if command and not command.startswith("#"):
                yield command


TRAIN_COMMANDS = sorted(
    # Without `resume=`: such a line takes its configuration from a run; see test_docs_examples.
    {
        line
        for page in PAGES
        for line in shell_lines(page)
        if line.startswith("flexfloor-train ") and " resume=" not in line
    }
)
IN_USERS_FOLDER = ("--config-dir", "--help", "...")


@pytest.mark.parametrize(
    "command", [line for line in TRAIN_COMMANDS if not set(line.split()) & set(IN_USERS_FOLDER)]
)
def test_a_command_of_the_docs_is_a_valid_run(command: str) -> None:
    words = [word for word in shlex.split(command)[1:] if "=" in word]
    # A sweep: its first value stands for all; a list is one value.
    overrides = [word if "[" in word else word.split(",")[0] for word in words]
    validate(to_train_config(compose([*overrides, "run_dir=unused"])), check_files=False)


def test_the_docs_show_enough_commands_to_check() -> None:
    assert len(TRAIN_COMMANDS) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"(?:scripts|bench)/\w+\.(?:sh|py)", page.read_text()))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"(tests/\S+?\.py)::(\w+)", page.read_text()))
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not ((ROOT / file).exists() and f"def {name}(" in (ROOT / file).read_text())
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_the_file_tree_of_the_readme_is_the_tree() -> None:
    tree = (ROOT / "README.md").read_text().split("## File tree")[1].split("```")[1]
    rooms = re.findall(r"^(?:  )?(\w+)/ ", tree, re.MULTILINE)
    missing = [room for room in rooms if not ((ROOT / room).is_dir() or (ROOT / "flexfloor" / room).is_dir())]
    assert len(rooms) > 10
    assert not missing
