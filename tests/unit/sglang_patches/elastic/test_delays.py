"""Delays for tests: off by default, and the same for the same seed."""

import time

import pytest

from sglang_patches.elastic.delays import DelayConfig, Delays


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def visit(delays: Delays, num_points: int = 200) -> int:
    for _ in range(num_points):
        delays.at("loop")
    return delays.num_delays


def test_without_a_probability_nothing_waits(slept_s: list[float]) -> None:
    assert visit(Delays(DelayConfig(), 0, "loop")) == 0
    assert slept_s == []


def test_certain_delays_wait_at_every_point_within_the_limits(slept_s: list[float]) -> None:
    assert visit(Delays(DelayConfig(probability=1.0, min_s=0.5, max_s=0.75), 0, "loop")) == 200
    assert len(slept_s) == 200
    assert 0.5 <= min(slept_s) < 0.55 < 0.7 < max(slept_s) <= 0.75


def test_a_seed_gives_each_rank_and_thread_its_own_delays(slept_s: list[float]) -> None:
    config = DelayConfig(probability=0.3, seed=7)
    drawn = []
    for ep_rank, thread in ((0, "loop"), (0, "loop"), (1, "loop"), (0, "prepare")):
        slept_s.clear()
        assert 30 < visit(Delays(config, ep_rank, thread)) < 90
        drawn.append(tuple(slept_s))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
