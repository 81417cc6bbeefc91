"""Any order of events: the invariants hold, the epoch never falls, what raises changes nothing."""

from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.membership import events as e
from flexfloor.membership.commands import FinishOperation, Prepare, SetRouting
from flexfloor.membership.state import InvalidTransition, Membership

EP_SIZE = 3
UNCOMPARED = ("outcome", "outcome_reason", "_out", "fences", "operations")
ranks = st.integers(0, EP_SIZE - 1)
lives = st.fixed_dictionaries({"ep_rank": ranks, "incarnation": st.sampled_from([7, 7, 7, 8])})
slots = st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=6).map(tuple)
epochs = st.sampled_from([-1, 0, 0, 0, 0, 1])  # from the newest number given
some_ranks = st.lists(ranks, max_size=EP_SIZE).map(tuple)
names = st.sampled_from("abcdef")


def of(kind, *bases, **fields):
    parts = [*bases, st.fixed_dictionaries(fields)]
    return st.tuples(*parts).map(
        lambda found: (kind, {key: value for part in found for key, value in part.items()})
    )


# (event class, fields without the time); RankJoined appears often enough for groups to start.
anything = st.one_of(
    of(e.RankJoined, lives, weight_version=st.sampled_from([0, 0, 0, 0, 1])),
    of(e.ReleaseRequested, operation_id=names, ep_ranks=some_ranks, leave=st.sampled_from(list(e.Leave))),
    of(e.RejoinRequested, operation_id=names, ep_ranks=some_ranks),
    of(e.DrainFinished, lives),
    of(e.RankSwitched, lives, membership_epoch=epochs, stall_s=st.just(0.1), num_bytes=st.just(8)),
    of(e.CancelAsked, lives, membership_epoch=epochs),
    of(e.CancelAnswered, lives, membership_epoch=epochs, dropped=st.booleans()),
    of(e.WorkArrived, lives),
    of(
        e.RankBroke,
        lives,
        generation=epochs,
        membership_epoch=epochs,
        slots=slots,
        weight_version=st.sampled_from([0, 0, 0, 1, None]),
        where=st.just("gather"),
    ),
    of(
        e.RankRecovered,
        lives,
        generation=epochs,
        membership_epoch=epochs,
        stall_s=st.just(0.1),
        num_bytes=st.just(8),
    ),
    of(e.WeightsUpdated, weight_version=st.integers(0, 1)),
    of(e.FenceRequested, fence_id=names, full=st.booleans()),
    of(e.FenceReleased, fence_id=names),
    of(e.TimePassed),
)
rare = st.one_of(
    of(e.RankLost, lives, reason=st.just("killed")),
    of(e.RecoveryFailed, lives, generation=epochs, reason=st.just("no mirror")),
)
steps = st.lists(
    st.tuples(st.one_of(*[anything] * 12, rare), st.sampled_from([0.0, 0.1, 1.0, 1.0, 50.0])), max_size=60
)


def started(floor: int) -> Membership:
    membership = Membership(EP_SIZE, floor, num_experts=6)
    for ep_rank in range(EP_SIZE):
        membership.handle(e.RankJoined(ep_rank=ep_rank, incarnation=7, weight_version=0, at=0.0))
    return membership


def snapshot(membership: Membership) -> str:
    parts = {**vars(membership), **vars(membership.fences), **vars(membership.operations)}
    return repr({key: value for key, value in parts.items() if key not in UNCOMPARED})


def run(membership: Membership, found) -> None:
    now_s = 0.0
    for (kind, fields), wait_s in found:
        now_s += wait_s
        if "generation" in fields:
            fields = {**fields, "generation": membership.generation + fields["generation"]}
        if "membership_epoch" in fields:
            fields = {**fields, "membership_epoch": membership.last_epoch + fields["membership_epoch"]}
        feed(membership, kind(**fields, at=now_s))


def feed(membership: Membership, event: e.Event) -> None:
    epoch, before = membership.membership_epoch, snapshot(membership)
    try:
        commands = membership.handle(event)
    except InvalidTransition:
        assert snapshot(membership) == before
        commands = []
    membership.validate()
    assert membership.membership_epoch >= epoch
    for command in commands:
        if isinstance(command, SetRouting | Prepare):
            assert command.ep_ranks if isinstance(command, SetRouting) else command.members
        if isinstance(command, FinishOperation):
            assert command.operation_id not in membership.operations.open
            assert command.ok == (command.reason == "")


@settings(max_examples=150, deadline=None)
@given(found=steps, floor=st.integers(1, EP_SIZE))
def test_any_order_of_events_from_a_group_that_serves(found, floor) -> None:
    run(started(floor), found)


@settings(max_examples=50, deadline=None)
@given(found=steps)
def test_any_order_of_events_from_the_start(found) -> None:
    run(Membership(EP_SIZE, 1, num_experts=3), found)
