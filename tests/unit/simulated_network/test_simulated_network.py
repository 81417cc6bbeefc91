"""The membership under drawn faults: the real Membership, Exchange, Lookout, LinkState and Member."""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from net_checks import INVARIANTS, Violation
from net_rules import RULES, broken
from net_story import Story, drawn
from net_world import World, told, violation_of

NUM_SCHEDULES = 400
MAX_SCHEDULES = 10_000
"""In which a rule that is broken on purpose must be found."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A refusal is logged with every story."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_schedule_breaks_an_invariant() -> None:
    faults: Counter[str] = Counter()
    checked: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        story = drawn(seed)
        world = World(story)
        try:
            world.run()
        except Violation as violation:
            pytest.fail(told(story, violation))
        faults += world.faults
        checked += world.checks.num_checked
        reached["recoveries"] += len(world.server.membership.status().recoveries)
        reached["changes"] += len(world.server.membership.status().last_switches)
        reached["continued"] += world.clients.num_continued
    # Whatever a story can do has been done, and whatever is promised has been looked at.
    assert len(faults) == 17, faults
    always = {*INVARIANTS} - {"assertion", "progress"}
    assert {*checked} == always, always ^ {*checked}
    assert min(reached.values()) > 20, reached


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_tells_the_same_story_again(seed: int) -> None:
    def run() -> tuple[int, float, Counter[str]]:
        world = World(drawn(seed))
        world.run()
        return world.num_events, world.now_s, world.faults

    assert run() == run()


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_found(rule: str) -> None:
    with broken(rule):
        found = next(seed for seed in range(MAX_SCHEDULES) if violation_of(drawn(seed)))
    assert violation_of(drawn(found)) is None, "with the rule in force the same story is fine"


def test_a_failure_is_told_by_its_shortest_story() -> None:
    with broken("a rank is where its own epoch puts it"):
        story = next(story for story in map(drawn, range(MAX_SCHEDULES)) if violation_of(story))
        violation = violation_of(story)
        assert violation is not None
        text = told(story, violation)
    head, _, steps = text.partition("The shortest story that was found for it:\n")
    assert head.startswith(f"{violation.invariant}: ")
    kinds = [line.split()[2].split("(")[0] for line in steps.splitlines()[1:]]
    assert 0 < len(kinds) < len(story.steps), text
    assert any(kind.startswith("kill") or kind in ("stop", "glitch") for kind in kinds), text


def test_a_story_without_steps_is_at_rest_at_once() -> None:
    world = World(Story(1, 3, 1, 0, ()))
    world.run()
    assert world.server.membership.is_ready
    assert world.now_s < 30
