"""The plan of bench/chaos.py: every kind as often as wanted, never more than three ranks of one step."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "integration" / "faults"))

from chaos_plan import KINDS, SURE, Injection, again, plan, quotas


@pytest.mark.parametrize("num_kills", [19, 25, 60, 100])
def test_every_kind_has_its_share(num_kills: int) -> None:
    wanted = quotas(num_kills)
    assert sum(wanted.values()) == num_kills
    assert all(wanted[kind] >= 1 for kind in KINDS)
    assert wanted[KINDS[0]] == max(wanted.values())


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_holds_what_was_asked_for(seed: int) -> None:
    steps = plan(60, seed)
    drawn = Counter(injection.kind for step in steps for injection in step)
    wanted = quotas(60)
    assert {kind: drawn[kind] for kind in KINDS} == wanted
    assert plan(60, seed) == steps
    assert plan(60, seed + 1) != steps
    for step in steps:
        ranks = [injection.ep_rank for injection in step if injection.kind.victim == "rank"]
        assert len(step) <= 3
        assert len(set(ranks)) == len(ranks)
        # A recovery is hit only where there is one.
        assert step[0].kind.phase != "recovery"


def test_what_has_missed_comes_again_with_what_it_needs() -> None:
    for kind in KINDS:
        step = again(Injection(kind=kind), 1)
        assert step[-1].kind == SURE
        needed = ["decode"] if kind.phase == "recovery" else []
        assert [one.kind.phase for one in step[:-1]] == [*needed, kind.phase]


def test_a_short_run_takes_the_heaviest_kinds() -> None:
    drawn = [injection.kind.phase for step in plan(2, 0) for injection in step]
    assert "decode" in drawn
    assert sum(quotas(2).values()) == 2
