"""What the docs show was really printed, drawn from real figures, and can be run."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from flexfloor.cli.compose import compose, save_resolved, to_train_config
from flexfloor.cli.refusals import USER_ERRORS, explain
from flexfloor.cli.resume import resumed_config
from flexfloor.config.rules import validate
from flexfloor.iterations import StepIterations
from flexfloor.membership.ranks import MOVES
from flexfloor.rollout.iteration_log import iterations_path, save_iterations
from sglang_patches.serve_args import parse

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
IMAGES = sorted((DOCS / "images").glob("*.svg"))


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """(page, text) of all fenced blocks of a kind."""
    for page in PAGES:
        for text in re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            yield page.name, text


REFUSALS = [
    (page, *text.strip().removeprefix("$ flexfloor-train ").split("\nerror: "))
    for page, text in blocks("console")
    if text.startswith("$ flexfloor-train ")
]


def test_there_are_refusals_to_check() -> None:
    assert len(REFUSALS) >= 6


def start(overrides: list[str], folder: Path) -> None:
    """As flexfloor-train does; `folder` stands for the run that is gone on with."""
    if overrides[0].startswith("resume="):
        save_resolved(compose(["experiment=quickstart", "run_dir=unused"]), str(folder))
        resumed_config(folder, overrides)
    validate(to_train_config(compose([*overrides, "run_dir=unused"])), check_files=False)


@pytest.mark.parametrize(("page", "command", "shown"), REFUSALS)
def test_a_refusal_is_what_is_printed(page: str, command: str, shown: str, tmp_path: Path) -> None:
    overrides = shlex.split(command)
    with pytest.raises(USER_ERRORS) as refused:
        start(overrides, tmp_path)
    assert explain(refused.value, overrides) == shown, page


SERVERS = [
    command.replace("\\\n", " ").split(" 2>&1")[0]
    for _, text in blocks("bash")
    for command in re.findall(r"^flexfloor-serve (?:.*\\\n)*.*$", text, re.MULTILINE)
    if "..." not in command
]


def test_there_are_servers_to_check() -> None:
    assert len(SERVERS) >= 4


@pytest.mark.parametrize("command", SERVERS)
def test_flags_of_a_server_are_accepted(command: str) -> None:
    args = parse(shlex.split(command)[1:])
    assert args.num_ranks > 1
    assert args.sglang_flags


@pytest.mark.parametrize(("page", "text"), list(blocks("python")))
def test_python_of_the_docs_finds_what_it_imports(page: str, text: str) -> None:
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports, page
    exec(compile(ast.Module(imports, []), page, "exec"), {})


def functions_of(page: str) -> dict[str, object]:
    names: dict[str, object] = {}
    for found, text in blocks("python"):
        if found == page:
            exec(compile(text, page, "exec"), names)
    return names


def test_sizes_of_a_checkpoint_are_those_of_the_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "hidden_size": 2048,
        "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    functions_of("sizing.md")["print_sizes"](str(tmp_path))  # type: ignore[operator]
    printed = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    preset = (ROOT / "conf" / "model" / "qwen3_30b_a3b.yaml").read_text()
    assert printed.items() <= dict(re.findall(r"^(\w+): (\S+)$", preset, re.MULTILINE)).items()
    assert len(printed) == 5


def test_tail_tokens_are_those_of_the_fullest_iteration_of_the_tail(tmp_path: Path) -> None:
    running = np.array([[2, 1], [1, 0], [1, 0]])
    context = np.array([[900, 100], [70, 0], [80, 0]])
    path = iterations_path(tmp_path, 3)
    path.parent.mkdir(parents=True)
    save_iterations(
        path,
        StepIterations(
            repeats=np.ones(3, np.int64), is_member=np.ones((3, 2), bool), num_running=running,
            context_tokens=context, prefill_tokens=np.zeros((3, 2), np.int64), num_retractions=0,
            seconds=np.ones(3),
        ),
    )  # fmt: skip
    tail_tokens = functions_of("sizing.md")["tail_tokens"]
    assert [tail_tokens(str(tmp_path), 3, size) for size in (2, 1, 0)] == [1000, 80, 0]  # type: ignore[operator]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_a_picture_is_readable_on_light_and_dark(image: Path) -> None:
    text = image.read_text()
    root = ElementTree.fromstring(text)
    assert root.get("aria-label")
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/", "")


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_every_picture_is_shown_with_words_for_who_cannot_see_it(image: Path) -> None:
    shown = re.findall(rf"!\[(.*?)\]\((?:docs/)?images/{image.name}\)", "".join(p.read_text() for p in PAGES))
    assert shown
    assert all(shown)


def texts_of(name: str) -> list[str]:
    root = ElementTree.parse(DOCS / "images" / name).getroot()
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_of_states_has_the_moves_of_the_code() -> None:
    drawn = set(re.findall(r'data-from="(\w+)" data-to="(\w+)"', (DOCS / "images/states.svg").read_text()))
    assert drawn == {(state.value, following.value) for state, moves in MOVES.items() for following in moves}


def test_the_picture_of_the_floor_has_the_figures_of_its_page() -> None:
    page = (DOCS / "floor.md").read_text()
    rows = {
        row[0]: row
        for row in re.findall(r"^\u2502 (\d+) +\u2502 +(\d+) \u2502 +(\S+) GiB", page, re.MULTILINE)
    }
    texts = texts_of("floor.svg")
    for size in ("8", "6", "4", "2", "1"):
        _, slots, experts = rows[size]
        assert f"{slots} slots" in texts
        assert experts in texts
    for figure in ("71.10 GiB", "102.65 GiB", "2.87"):
        assert figure in page
        assert any(figure in text for text in texts)


def test_the_picture_of_slots_has_the_figures_of_the_page_of_the_floor() -> None:
    page, texts = (DOCS / "floor.md").read_text(), " ".join(texts_of("slots.svg")).replace(",", "")
    (spare, small, large) = re.findall(r"full group: (\S+) GiB a rank, (\d+) instead of (\d+)", page)[0]
    assert all(figure in texts for figure in (f"{spare} GiB", small, large))
