"""Signals that end a run: delivered to this very process."""

import asyncio
import os
import signal

import pytest

from flexfloor.driver.stopping import StopRequested, StopSignals


def send(number: signal.Signals) -> None:
    """Handled before the next line: a signal to the own process is delivered at once."""
    os.kill(os.getpid(), number)


def test_a_request_waits_for_the_next_check() -> None:
    with StopSignals() as stop:
        stop.check()
        send(signal.SIGUSR1)
        with pytest.raises(StopRequested):
            stop.check()
        with pytest.raises(StopRequested), stop.interruptible():
            pytest.fail("the block must not begin")


def test_a_request_breaks_off_a_rollout_once() -> None:
    closed = []

    async def rollout() -> None:
        try:
            send(signal.SIGUSR1)
            await asyncio.sleep(60)
        finally:
            # The clean-up of the broken-off step gets to its end, whatever comes.
            send(signal.SIGUSR1)
            closed.append(True)

    with StopSignals() as stop:
        with pytest.raises(StopRequested), stop.interruptible():
            asyncio.run(rollout())
        assert closed == [True]
        # Outside, it asks for nothing that has not been asked for.
        send(signal.SIGUSR1)


def test_the_end_interrupts_anywhere() -> None:
    with StopSignals(), pytest.raises(KeyboardInterrupt) as caught:
        send(signal.SIGTERM)
    assert not isinstance(caught.value, StopRequested)


def test_a_second_end_does_not_break_off_the_first_ones_clean_up() -> None:
    cleaned = []

    def end_twice() -> None:
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)
            cleaned.append(True)

    with StopSignals(), pytest.raises(KeyboardInterrupt):
        end_twice()
    assert cleaned == [True]


def test_earlier_handlers_are_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)]
    with StopSignals():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)] == before
