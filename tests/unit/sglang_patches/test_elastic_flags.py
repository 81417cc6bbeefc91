"""What elastic membership cannot be combined with: refused by flexfloor-serve, and named in the docs."""

from dataclasses import fields
from pathlib import Path

import pytest

from flexfloor.config.schema import MembershipConfig
from sglang_patches import serve
from sglang_patches.elastic_flags import ONLY, SWITCHES
from sglang_patches.serve_args import parse

PAGE = Path(__file__).parents[3] / "docs" / "elastic.md"
FOUR = ["--tp-size", "4", "--ep-size", "4", "--dp-size", "4", "--enable-dp-attention", "--enable-dp-lm-head"]
SERVE = ["--model-path", "m", "--device", "cpu", "--moe-dense-tp-size", "1"]
ELASTIC = ["--flexfloor-membership", "elastic"]


@pytest.mark.parametrize("flag", [*SWITCHES, *ONLY])
def test_every_such_flag_is_refused_before_anything_starts(flag: str) -> None:
    parse([*SERVE, *FOUR, *ELASTIC])
    with pytest.raises(SystemExit, match=f"flexfloor-serve: {flag}=.* Fix: "):
        parse([*SERVE, *FOUR, *ELASTIC, f"{flag}=9"])


@pytest.mark.parametrize("flag", ONLY)
def test_the_values_that_are_allowed_pass(flag: str) -> None:
    for value in ONLY[flag][0].split():
        parse([*SERVE, *FOUR, *ELASTIC, flag, value])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tp-size", "4"], "--flexfloor-membership=elastic: needs several ranks"),
        ([*FOUR[2:], "--tp-size", "8"], "--tp-size, --dp-size and --ep-size must be equal"),
        ([*FOUR, "--flexfloor-floor", "5"], "--flexfloor-floor=5: there are 4 ranks. Fix: take 1 to 4"),
        ([*FOUR, "--flexfloor-expert-slots", "some"], "--flexfloor-expert-slots=some: unknown"),
        ([*FOUR, "--flexfloor-park-frees", "kv,disk"], "--flexfloor-park-frees=kv,disk: unknown"),
    ],
)
def test_a_group_that_cannot_lose_a_rank_is_refused(flags: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as refused:
        parse([*SERVE, *ELASTIC, *flags])
    assert text in str(refused.value)


def test_the_page_names_every_flag_with_its_reason() -> None:
    lines = PAGE.read_text().splitlines()
    rows = {flag: f"| `{flag}` | {reason} |" for flag, reason in SWITCHES.items()}
    for flag, (values, reason) in ONLY.items():
        allowed = ", ".join(f"`{value}`" for value in values.split())
        rows[flag] = f"| `{flag}` | {allowed} | {reason} |"
    assert not [row for row in rows.values() if row not in lines]
    listed = [line.split("`")[1] for line in lines if line.startswith("| `--")]
    assert listed == list(rows)


def test_the_page_names_our_own_flags_and_keys() -> None:
    text = PAGE.read_text()
    help_text = serve.__doc__
    assert help_text is not None
    own = {word.rstrip(",.") for word in help_text.split() if word.startswith("--flexfloor-")}
    own -= {"--flexfloor-collectives", "--flexfloor-leave-out", "--flexfloor-iteration-log"}
    # Those stand in server_api.md.
    own -= {"--flexfloor-release", "--flexfloor-release-quiet", "--flexfloor-clock"}
    keys = {f"membership.{field.name}" for field in fields(MembershipConfig)}
    assert len(own) >= 7
    assert not [name for name in {*own, *keys} if f"`{name}`" not in text]
