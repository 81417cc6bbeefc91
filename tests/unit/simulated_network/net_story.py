"""Stories: what is asked of a group and done to it, step by step; drawn from a seed, and shortened."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ACTIVE_S = 25.0
"""Steps lie before this time, and all faults are over soon after."""


@dataclass(frozen=True, slots=True)
class Step:
    at_s: float
    kind: str
    args: tuple[Any, ...] = ()

    @property
    def is_severe(self) -> bool:
        """It may cost a rank. Without such a step nothing may break."""
        if self.kind in ("partition", "manager_stop"):
            return bool(self.args[-1] > 2)
        return self.kind in ("kill", "kill_in_recovery", "kill_in_change", "stop", "glitch", "server_restart")

    def __str__(self) -> str:
        return f"t={self.at_s:6.2f}  {self.kind}{self.args}"


@dataclass(frozen=True, slots=True)
class Story:
    seed: int
    """Of what chance decides inside: how long a message takes, who fails first."""
    ep_size: int
    floor: int
    num_far: int
    """Ranks on another node, the highest: their processes cannot be watched or killed."""
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        head = f"seed={self.seed} ep_size={self.ep_size} floor={self.floor} num_far={self.num_far}"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])


def drawn(seed: int) -> Story:
    rng = random.Random(seed)
    ep_size = rng.randint(2, 5)
    floor = rng.randint(1, max(1, ep_size - 1))
    num_far = rng.choice([0, 0, 0, 1])
    ranks = range(ep_size)
    draws: dict[str, tuple[float, Callable[[], tuple[Any, ...]]]] = {
        "request": (4, lambda: (rng.randint(1, 12),)),
        "burst": (3, lambda: (rng.randint(2, 12), round(rng.uniform(0.1, 4), 1))),
        "release": (5, lambda: (_some(rng, ranks), rng.choice(["park", "park", "park", "exit"]))),
        "rejoin": (3, lambda: (rng.choice([(), _some(rng, ranks)]),)),
        "fence": (1, lambda: (rng.random() < 0.5, round(rng.uniform(0, 2), 2))),
        "update": (1.5, lambda: ()),
        "kill": (1.5, lambda: (rng.choice(ranks),)),
        "kill_in_recovery": (1.0, lambda: (rng.choice(ranks),)),
        "kill_in_change": (1.0, lambda: (rng.choice(ranks),)),
        "stop": (0.6, lambda: (rng.choice(ranks), rng.choice([1.0, 5.0, 1000.0]))),
        "glitch": (1.0, lambda: (rng.choice(ranks),)),
        "lossy": (1.2, lambda: (round(rng.uniform(0.05, 0.6), 2), round(rng.uniform(0.5, 4), 1))),
        "repeating": (1.0, lambda: (round(rng.uniform(0.05, 0.6), 2), round(rng.uniform(0.5, 4), 1))),
        "slow": (1.2, lambda: (round(rng.uniform(0.1, 3), 1), round(rng.uniform(0.5, 4), 1))),
        "partition": (0.8, lambda: (_some(rng, ranks), rng.choice([0.5, 2.0, 6.0, 30.0]))),
        "reconnect": (0.5, lambda: (rng.choice(ranks),)),
        "manager_stop": (0.4, lambda: (rng.choice([0.5, 5.0, 40.0]),)),
        "clock_jump": (0.4, lambda: (rng.choice([3.0, 100.0]),)),
        "rank_clock_jump": (0.3, lambda: (rng.choice(ranks), rng.choice([3.0, 100.0]))),
        "second_process": (0.3, lambda: (rng.choice(ranks),)),
        "server_restart": (0.15, lambda: (rng.random() < 0.5,)),
    }
    kinds, weights = list(draws), [weight for weight, _ in draws.values()]
    times = sorted(round(rng.uniform(0, ACTIVE_S), 2) for _ in range(rng.randint(6, 26)))
    steps = []
    is_calm = rng.random() < 0.35
    for at_s in times:
        kind = rng.choices(kinds, weights)[0]
        step = Step(at_s, kind, draws[kind][1]())
        if not (is_calm and step.is_severe):
            steps.append(step)
    return Story(seed, ep_size, floor, num_far, tuple(steps))


def _some(rng: random.Random, ranks: range) -> tuple[int, ...]:
    return tuple(sorted(rng.sample(ranks, rng.randint(1, max(1, len(ranks) - 1)))))


def shortened(story: Story, fails: Callable[[Story], bool], max_tries: int = 400) -> Story:
    """The same failure with as few steps as can be found: chunks are left out, ever smaller ones."""
    tries = 0
    size = max(1, len(story.steps) // 2)
    while size >= 1:
        start, has_shrunk = 0, False
        while start < len(story.steps) and tries < max_tries:
            tries += 1
            rest = (*story.steps[:start], *story.steps[start + size :])
            shorter = Story(story.seed, story.ep_size, story.floor, story.num_far, rest)
            if fails(shorter):
                story, has_shrunk = shorter, True
            else:
                start += size
        if not has_shrunk or size > 1:
            size = size // 2 if size > 1 else 0
    return story
