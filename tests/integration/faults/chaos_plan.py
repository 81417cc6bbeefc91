"""Which process dies where, and in which rollout step: drawn by a seed, each kind so often. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RANKS = 4
RANK_POINTS = ("decode", "prefill", "gather", "switch", "recovery", "update")
"""Points of `sglang_patches.elastic.fault_points`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Example: Kind(victim="rank", action="kill", phase="decode", weight=8)"""

    victim: str
    """`rank`, `server`, `trainer` or `driver`."""
    action: str
    """`kill`: like kill -9. `stop`: like a hung process, by SIGSTOP."""
    phase: str
    weight: int
    """Of a run with 60 kills, so many are of this kind."""

    @property
    def name(self) -> str:
        return f"{self.victim} {self.action} {self.phase}"


KINDS = (
    Kind(victim="rank", action="kill", phase="decode", weight=8),
    Kind(victim="rank", action="kill", phase="prefill", weight=4),
    Kind(victim="rank", action="kill", phase="gather", weight=4),
    Kind(victim="rank", action="kill", phase="switch", weight=4),
    Kind(victim="rank", action="kill", phase="recovery", weight=6),
    Kind(victim="rank", action="kill", phase="update", weight=4),
    Kind(victim="rank", action="kill", phase="parked", weight=4),
    Kind(victim="rank", action="kill", phase="any", weight=6),
    Kind(victim="rank", action="stop", phase="decode", weight=4),
    Kind(victim="rank", action="stop", phase="gather", weight=3),
    Kind(victim="server", action="kill", phase="rollout", weight=2),
    Kind(victim="server", action="kill", phase="sync", weight=2),
    Kind(victim="trainer", action="kill", phase="rollout", weight=1),
    Kind(victim="trainer", action="kill", phase="train", weight=2),
    Kind(victim="trainer", action="kill", phase="sync", weight=1),
    Kind(victim="driver", action="kill", phase="rollout", weight=2),
    Kind(victim="driver", action="kill", phase="train", weight=1),
    Kind(victim="driver", action="kill", phase="sync", weight=1),
    Kind(victim="driver", action="kill", phase="save", weight=1),
)
SURE = next(kind for kind in KINDS if kind.victim == "server" and kind.phase == "sync")
OTHERS_NEED_A_LOSS = ("recovery",)
"""Points that are reached only when another rank was lost before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    kind: Kind
    ep_rank: int = -1
    """Of a rank."""
    delay_s: float = 0.0
    """Of `any`, from the first token of the rollout."""


def quotas(num_kills: int) -> dict[Kind, int]:
    """How often each kind is wanted: by weight, and once at least where there are kills enough."""
    by_weight = sorted(KINDS, key=lambda kind: -kind.weight)
    wanted = {kind: int(by_weight.index(kind) < num_kills) for kind in KINDS}
    while sum(wanted.values()) < num_kills:
        wanted[min(KINDS, key=lambda kind: wanted[kind] / kind.weight)] += 1
    return wanted


def plan(num_kills: int, seed: int) -> list[list[Injection]]:
    """The injections of every rollout step, of one step in order.

    A step loses three ranks at most, so that one is left of four; what needs a loss comes after one.
    """
    generator = random.Random(seed)
    wanted = [kind for kind, number in quotas(num_kills).items() for _ in range(number)]
    ranks = [kind for kind in wanted if kind.victim == "rank"]
    others = [[Injection(kind=kind)] for kind in wanted if kind.victim != "rank"]
    generator.shuffle(ranks)
    steps = [*_together(ranks, generator), *others]
    generator.shuffle(steps)
    return steps


def again(missed: Injection, seed: int) -> list[Injection]:
    """A step for an injection that has not hit, with what it needs before it, and a sure one after it.

    The sure one makes up for the step: not in every rollout a rank leaves, so a miss may miss once more.
    """
    generator = random.Random(seed)
    needs = missed.kind.phase in OTHERS_NEED_A_LOSS
    return [*_placed([KINDS[0], missed.kind] if needs else [missed.kind], generator), Injection(kind=SURE)]


def _together(kinds: Sequence[Kind], generator: random.Random) -> list[list[Injection]]:
    second = [kind for kind in kinds if kind.phase in OTHERS_NEED_A_LOSS]
    # What breaks the group for sure, and at once.
    first = [kind for kind in kinds if kind.phase in ("decode", "prefill", "gather")]
    rest = [kind for kind in kinds if kind not in second and kind not in first]
    steps = []
    for kind in second:
        opener = first.pop() if first else next(one for one in KINDS if one.phase == "decode")
        steps.append([opener, kind])
    single = [*first, *rest]
    generator.shuffle(single)
    # Several in one step: the next may be lost before the recovery of the one before is over.
    while single:
        steps.append([single.pop() for _ in range(min(len(single), generator.choice((1, 2, 2, 3))))])
    return [_placed(step, generator) for step in steps]


def _placed(kinds: Sequence[Kind], generator: random.Random) -> list[Injection]:
    ranks = generator.sample(range(NUM_RANKS), len(kinds))
    return [
        Injection(kind=kind, ep_rank=rank, delay_s=generator.uniform(0.0, 1.5))
        for kind, rank in zip(kinds, ranks, strict=True)
    ]
