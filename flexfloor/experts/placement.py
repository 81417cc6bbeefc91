"""Which rank of the EP group holds which logical expert, for any set of members. PURE.

Three rules. Every logical expert has exactly one serving slot. A member holds its own canonical block (the
experts that it holds in the full group) in slots 0 .. n-1, so the full group always has the canonical
placement. Orphans, the experts whose canonical owner is not a member, lie in further slots of members:

    8 experts on 4 ranks, n = 2       members 0 1 2 3        members 0 1 3           members 0 1
                                      0 | 0 1                0 | 0 1 4               0 | 0 1 4 6
                                      1 | 2 3                1 | 2 3 5               1 | 2 3 5 7
                                      2 | 4 5                3 | 6 7
                                      3 | 6 7

A change of members never puts an expert into a slot that serves another one in the old placement: weights
are received while the old group still decodes, and the switch itself is a change of maps.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flexfloor.model_memory import max_experts_per_rank as max_experts_per_rank


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    num_experts: int
    ep_size: int
    """Ranks of the full group, as launched."""
    slots: tuple[tuple[int, tuple[int | None, ...]], ...]
    """(ep_rank, the logical expert in each of its expert slots) by ep_rank; None is a free slot."""

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(ep_rank for ep_rank, _ in self.slots)

    @property
    def block_size(self) -> int:
        """Experts of a canonical block: n above."""
        return self.num_experts // self.ep_size

    def block(self, ep_rank: int) -> range:
        """Canonical experts of a rank, member or not."""
        return range(ep_rank * self.block_size, (ep_rank + 1) * self.block_size)

    def experts_on(self, ep_rank: int) -> tuple[int | None, ...]:
        for member, experts in self.slots:
            if member == ep_rank:
                return experts
        raise ValueError(f"ep_rank {ep_rank} is no member: the members are {self.members}")

    def num_experts_on(self, ep_rank: int) -> int:
        return sum(expert is not None for expert in self.experts_on(ep_rank))

    def holder(self, expert: int) -> int:
        """The ep_rank that serves a logical expert."""
        for ep_rank, experts in self.slots:
            if expert in experts:
                return ep_rank
        raise ValueError(f"expert {expert} has no slot on the members {self.members}")

    def slot_map(self, ep_rank: int) -> tuple[int, ...]:
        """Logical expert -> its slot on that rank, -1 where the expert is elsewhere."""  # [num_experts]
        slot_of = [-1] * self.num_experts
        for slot, expert in enumerate(self.experts_on(ep_rank)):
            if expert is not None:
                slot_of[expert] = slot
        return tuple(slot_of)

    def validate(self) -> None:
        """The three rules of this module, as far as one placement shows them; raises ValueError."""
        _check_sizes(self.num_experts, self.ep_size)
        _check_members(self.members, self.ep_size)
        if list(self.members) != sorted(self.members):
            raise ValueError(f"the members {self.members} are not in order")
        self._check_experts()
        for ep_rank, experts in self.slots:
            if experts[: self.block_size] != tuple(self.block(ep_rank)):
                raise ValueError(f"ep_rank {ep_rank} holds {experts} without its canonical block in front")
            if experts[-1] is None:
                raise ValueError(f"ep_rank {ep_rank} ends with a free slot: {experts}")

    def _check_experts(self) -> None:
        placed = [expert for _, experts in self.slots for expert in experts if expert is not None]
        if sorted(placed) != list(range(self.num_experts)):
            missing = sorted(set(range(self.num_experts)) - set(placed))
            twice = sorted({expert for expert in placed if placed.count(expert) > 1})
            raise ValueError(
                f"every expert below {self.num_experts} needs exactly one slot: {missing} have none, "
                f"{twice} have more, the highest is {max(placed, default=None)}"
            )


@dataclass(frozen=True, slots=True)
class Transfer:
    """One expert's weights, of every layer, from the rank that serves it in the old group to another."""

    expert: int
    source: int
    target: int
    source_slot: int
    target_slot: int


def canonical(num_experts: int, ep_size: int) -> ExpertPlacement:
    """Contiguous blocks in rank order, as SGLang starts."""
    _check_sizes(num_experts, ep_size)
    block_size = num_experts // ep_size
    blocks = (tuple(range(rank * block_size, (rank + 1) * block_size)) for rank in range(ep_size))
    return ExpertPlacement(num_experts, ep_size, tuple(enumerate(blocks)))


def rehome(
    old: ExpertPlacement, members: Collection[int], *, load: Sequence[float] | None = None
) -> ExpertPlacement:
    """The placement for other members that moves little and stays even.

    An orphan stays in its very slot while its holder is a member with at most ceil(E / members) experts.
    Orphans without a holder, then those beyond that number, go to the least loaded member below it, ties to
    the lowest rank. `load` is a measured share per logical expert; without it every expert weighs the same.

    Where members only leave or only join, no slot beyond ceil(E / the smallest group so far) is used. One
    that only leaves from the canonical placement is within ceil(E / members); after members joined, a
    holder keeps more where moving an orphan would need a slot that still serves another expert.
    """
    _check_members(members, old.ep_size)
    weights = _checked_load(load, old.num_experts)
    most = max_experts_per_rank(old.num_experts, len(members))
    rows = [_Row.kept(old, ep_rank, members, weights) for ep_rank in sorted(members)]
    num_slots = max(most, *(len(experts) for _, experts in old.slots))
    kept = {expert for row in rows for expert in row.slots}
    homeless = [expert for expert in range(old.num_experts) if expert not in kept]
    # The heaviest first: what comes late evens out. A stable sort keeps the order where weights are equal.
    for expert in sorted(homeless, key=lambda expert: -weights[expert]):
        row = _least_loaded(rows, most, num_slots) or _least_loaded(rows, most, None)
        assert row is not None, "members x most experts of a member is no less than all experts"
        row.put(expert, weights[expert])
    for row in rows:
        _move_surplus(row, rows, old.block_size, most, num_slots, weights)
    return ExpertPlacement(old.num_experts, old.ep_size, tuple((row.ep_rank, row.trimmed()) for row in rows))


def repaired(
    num_experts: int, ep_size: int, held: Mapping[int, Sequence[int | None]], members: Collection[int]
) -> ExpertPlacement:
    """The placement after a loss, from what each member itself says to hold. Nobody decodes meanwhile.

    Args:
        held: ep_rank -> the expert in each of its slots, None where nothing usable lies. A member that is
            missing here holds nothing. What does not fit the rules of this module is not counted as held.

    A member's own block comes first, held or not. An orphan stays with its first holder, by rank; one that
    nobody holds goes to the least loaded member, into its first slot that serves nothing.
    """
    _check_sizes(num_experts, ep_size)
    _check_members(members, ep_size)
    block_size = num_experts // ep_size
    most = max_experts_per_rank(num_experts, len(members))
    placed = {expert for rank in members for expert in range(rank * block_size, (rank + 1) * block_size)}
    rows = []
    for ep_rank in sorted(members):
        slots: list[int | None] = list(range(ep_rank * block_size, (ep_rank + 1) * block_size))
        for expert in held.get(ep_rank, ())[block_size:]:
            is_orphan = expert is not None and 0 <= expert < num_experts and expert not in placed
            slots.append(expert if is_orphan else None)
            placed.update([expert] if is_orphan and expert is not None else [])
        count = sum(expert is not None for expert in slots)
        rows.append(_Row(ep_rank, (), slots, count, count))
    for expert in sorted(set(range(num_experts)) - placed):
        row = _least_loaded(rows, most, None)
        assert row is not None, "members x most experts of a member is no less than all experts"
        row.put(expert, 1.0)
    return ExpertPlacement(num_experts, ep_size, tuple((row.ep_rank, row.trimmed()) for row in rows))


def to_restore(held: Sequence[int | None], wanted: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
    """(slot, expert) whose weights a rank lacks after a loss: what it holds stays in its very slot."""
    return tuple(
        (slot, expert)
        for slot, expert in enumerate(wanted)
        if expert is not None and (slot >= len(held) or held[slot] != expert)
    )


def transfers(old: ExpertPlacement, new: ExpertPlacement) -> tuple[Transfer, ...]:
    """What each member of `new` must receive before the switch, by (source, target, expert).

    Sources are members of `old`, those who leave included. A rank that is not in `old` holds nothing: it
    gave its memory back, so it receives its canonical block too.
    """
    places = _places(old)
    found = []
    for target, experts in new.slots:
        for target_slot, expert in enumerate(experts):
            if expert is not None and places[expert] != (target, target_slot):
                source, source_slot = places[expert]
                found.append(Transfer(expert, source, target, source_slot, target_slot))
    return tuple(sorted(found, key=lambda item: (item.source, item.target, item.expert)))


@dataclass(slots=True)
class _Row:
    """The slots of one member, as `rehome` fills them."""

    ep_rank: int
    before: tuple[int | None, ...]
    """What its slots serve in the old placement; nothing for a rank that joins."""
    slots: list[int | None]
    load: float
    count: int

    @classmethod
    def kept(
        cls, old: ExpertPlacement, ep_rank: int, members: Collection[int], weights: Sequence[float]
    ) -> "_Row":
        """What a member goes on holding: its block, and orphans whose owner does not come back."""
        block = old.block(ep_rank)
        before = old.experts_on(ep_rank) if ep_rank in old.members else ()
        orphans = [
            None if expert is None or expert // old.block_size in members else expert
            for expert in before[len(block) :]
        ]
        held = [*block, *(expert for expert in orphans if expert is not None)]
        return cls(ep_rank, before, [*block, *orphans], sum(weights[expert] for expert in held), len(held))

    def clean_slot(self) -> int:
        """The lowest slot that is free and serves nothing in the old placement."""
        for slot, expert in enumerate(self.slots):
            if expert is None and (slot >= len(self.before) or self.before[slot] is None):
                return slot
        return len(self.slots)

    def put(self, expert: int, weight: float) -> None:
        slot = self.clean_slot()
        if slot == len(self.slots):
            self.slots.append(expert)
        else:
            self.slots[slot] = expert
        self.load += weight
        self.count += 1

    def take(self, slot: int, weight: float) -> None:
        self.slots[slot] = None
        self.load -= weight
        self.count -= 1

    def trimmed(self) -> tuple[int | None, ...]:
        last = max(slot for slot, expert in enumerate(self.slots) if expert is not None)
        return tuple(self.slots[: last + 1])


def _least_loaded(rows: Sequence[_Row], most: int, num_slots: int | None) -> _Row | None:
    """The member for one more expert; None where each has `most` or no clean slot below `num_slots`."""
    open_rows = [
        row for row in rows if row.count < most and (num_slots is None or row.clean_slot() < num_slots)
    ]
    return min(open_rows, key=lambda row: (row.load, row.count, row.ep_rank), default=None)


def _move_surplus(
    row: _Row, rows: Sequence[_Row], block_size: int, most: int, num_slots: int, weights: Sequence[float]
) -> None:
    for slot in reversed(range(block_size, len(row.slots))):
        expert = row.slots[slot]
        if row.count <= most:
            return
        if expert is None:
            continue
        other = _least_loaded(rows, most, num_slots)
        if other is None:
            return
        row.take(slot, weights[expert])
        other.put(expert, weights[expert])


def _places(placement: ExpertPlacement) -> dict[int, tuple[int, int]]:
    """Logical expert -> (ep_rank, slot)."""
    return {
        expert: (ep_rank, slot)
        for ep_rank, experts in placement.slots
        for slot, expert in enumerate(experts)
        if expert is not None
    }


def _check_sizes(num_experts: int, ep_size: int) -> None:
    if ep_size < 1 or num_experts < 1 or num_experts % ep_size:
        raise ValueError(
            f"ep_size={ep_size} does not divide num_experts={num_experts}: "
            "every rank of the full group holds the same number of experts"
        )


def _check_members(members: Collection[int], ep_size: int) -> None:
    ranks = sorted(members)
    if not ranks or ranks[0] < 0 or ranks[-1] >= ep_size or len(set(ranks)) != len(ranks):
        raise ValueError(f"members={ranks}: they must be one or more different ranks below ep_size={ep_size}")


def _checked_load(load: Sequence[float] | None, num_experts: int) -> Sequence[float]:
    if load is None:
        return [1.0] * num_experts
    if len(load) != num_experts:
        raise ValueError(f"load has {len(load)} shares for {num_experts} experts")
    if any(not math.isfinite(share) or share < 0 for share in load):
        raise ValueError("load must be a finite share of at least 0 for every expert")
    return load
