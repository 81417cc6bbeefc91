"""The clock of deadlines, and the wire's session."""

from hypothesis import given
from hypothesis import strategies as st

from flexfloor.membership.session import RESEND_S, Session
from flexfloor.membership.steady_clock import SteadyClock


def test_time_that_was_slept_too_long_does_not_count() -> None:
    now_s = [10.0]
    clock = SteadyClock(lambda: now_s[0])
    clock.sleeps_until(15.0)
    now_s[0] = 15.5
    assert (clock.woke(), clock()) == (0.0, 15.5)
    clock.sleeps_until(20.0)
    now_s[0] = 120.0
    assert (clock.woke(), clock(), clock.woke()) == (104.5, 15.5, 0.0)
    clock.sleeps_until(None)
    now_s[0] = 500.0
    assert (clock.woke(), clock()) == (0.0, 395.5)


@given(data=st.data())
def test_every_message_arrives_once_and_in_order_whatever_the_wire_does(data) -> None:
    sender, receiver = Session(), Session()
    wire: list[tuple[int, str]] = []
    arrived: list[str] = []
    now_s, num_sent = 0.0, 0
    for action in data.draw(st.lists(st.sampled_from(["send", "deliver", "drop", "repeat", "tick"]))):
        if action == "send":
            num_sent += 1
            wire.append((sender.send(f"m{num_sent}", now_s), f"m{num_sent}"))
        elif action == "tick":
            now_s += RESEND_S / 2
            wire += sender.due(now_s)
        elif wire:
            index = data.draw(st.integers(0, len(wire) - 1))
            number, message = wire[index] if action == "repeat" else wire.pop(index)
            if action != "drop":
                arrived += receiver.take(number, message)
                sender.hear(receiver.heard)
    now_s += RESEND_S
    for number, message in sender.due(now_s):
        arrived += receiver.take(number, message)
    assert arrived == [f"m{number}" for number in range(1, num_sent + 1)]
    sender.hear(receiver.heard)
    assert sender.due(now_s + RESEND_S) == []
