"""The short list of member sets that are prepared at the start: `0,1,2,3;0,1`. PURE.

On a GPU a member set costs a communicator and a set of CUDA graphs, so both are made ahead for the sets that
a run means to shrink to. The full set is always prepared and need not be named.
"""

MemberSets = tuple[tuple[int, ...], ...]


def parse(text: str) -> MemberSets:
    """The sets in the order given, each sorted. Raises ValueError with the problem."""
    return tuple(_ranks(part) for part in text.split(";") if part.strip())


def _ranks(text: str) -> tuple[int, ...]:
    names = [name.strip() for name in text.split(",")]
    if not all(name.isdecimal() for name in names):
        raise ValueError(f"{text.strip()!r} is no list of ranks")
    return tuple(sorted(map(int, names)))


def problem_of(sets: MemberSets, *, num_ranks: int, floor: int) -> str | None:
    """Why a group of `num_ranks` ranks cannot prepare these sets; None when it can."""
    for members in sets:
        name = ",".join(map(str, members))
        if len(set(members)) < len(members):
            return f"{name} names a rank twice"
        if members[-1] >= num_ranks:
            return f"{name} names rank {members[-1]}, and there are {num_ranks} ranks"
        if len(members) < floor:
            return f"{name} is smaller than the floor of {floor}"
    if len(set(sets)) < len(sets):
        return "a set is named twice"
    return None


def without_full(sets: MemberSets, num_ranks: int) -> MemberSets:
    """The sets to prepare besides the full one, which SGLang itself prepares."""
    return tuple(members for members in sets if len(members) < num_ranks)
