"""Control requests over a recovery: none lost, none twice, whichever ranks were one broadcast ahead."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.elastic.controls import ControlLog


def settle(logs: list[ControlLog], epoch: int) -> None:
    reports = [copy.deepcopy(log.report(was_member=True)) for log in logs]
    for log in logs:
        log.settle(reports, epoch, was_member=True)


@given(
    num_even=st.integers(0, 3),
    ahead=st.sets(st.integers(0, 2)),
    requests=st.lists(st.text(max_size=3), max_size=3),
)
def test_who_missed_the_last_broadcast_gets_it_with_the_next(
    num_even: int, ahead: set[int], requests: list[str]
) -> None:
    logs = [ControlLog() for _ in range(3)]
    seen: list[list[str]] = [[] for _ in logs]
    for number in range(num_even):
        for rank, log in enumerate(logs):
            seen[rank] += log.take([f"old{number}"])
    for rank in ahead:
        seen[rank] += logs[rank].take(requests)
    settle(logs, epoch=1)
    for rank, log in enumerate(logs):
        seen[rank] += log.take(["new"])
    expected = [f"old{number}" for number in range(num_even)] + (requests if ahead else []) + ["new"]
    assert seen == [expected] * 3


def test_what_the_source_was_about_to_send_reaches_everybody_once() -> None:
    logs = [ControlLog() for _ in range(3)]
    for log in logs:
        log.take([])
    logs[0].hold(["abort"])
    settle(logs, epoch=1)
    assert [log.take([]) for log in logs] == [["abort"]] * 3
    assert [log.take([]) for log in logs] == [[]] * 3


def test_the_source_failed_after_some_had_it() -> None:
    logs = [ControlLog() for _ in range(3)]
    logs[0].hold(["abort"])
    assert logs[1].take(["abort"]) == ["abort"]
    settle(logs, epoch=1)
    assert [log.take([]) for log in logs] == [["abort"], [], ["abort"]]


def test_a_rank_that_a_second_loss_kept_from_settling_catches_up() -> None:
    logs = [ControlLog() for _ in range(3)]
    assert logs[0].take(["pause"]) == ["pause"]
    reports = [log.report(was_member=True) for log in logs]
    # Rank 2 did not get that far, and then there was another loss.
    for log in logs[:2]:
        log.settle(reports, 1, was_member=True)
    settle(logs, epoch=2)
    assert [log.take([]) for log in logs] == [[], ["pause"], ["pause"]]


def test_a_rank_that_has_not_switched_stands_where_the_others_did() -> None:
    logs = [ControlLog() for _ in range(3)]
    for log in logs:
        log.take(["old"])
    for log in logs[:2]:
        log.switch(1)
    logs[0].take(["flush"])
    settle(logs, epoch=2)
    assert [log.take([]) for log in logs] == [[], ["flush"], ["flush"]]


def test_a_rank_from_outside_has_missed_nothing() -> None:
    inside, parked = ControlLog(), ControlLog()
    inside.take(["flush"])
    reports = [inside.report(was_member=True), parked.report(was_member=False)]
    inside.settle(reports, 1, was_member=True)
    parked.settle(reports, 1, was_member=False)
    assert [inside.take([]), parked.take([])] == [[], []]
