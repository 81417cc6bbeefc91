"""Clocks: the table of model values, ratios that decisions rest on, and what wraps a clock."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.scheduling.clocks import (
    GPUS,
    H100,
    H200,
    CorrectedClock,
    FittedClock,
    GpuClock,
    NeutralClock,
    ScaledClock,
    make_clock,
)
from flexfloor.scheduling.cost import Clock, GroupLoad
from flexfloor.scheduling.gpu_clock import balanced_load
from flexfloor.scheduling.loads import Loads, decode_many_s

TABLE_T0_S = 4.5e-3
COLUMNS = ((1, 4096), (8, 8192), (32, 8192), (128, 4096), (512, 2048), (1024, 2048))
TABLE_MS = {  # ranks: (H200, H100) for each column of responses x context
    1: ((6.3, 7.1), (12.1, 15.4), (25.8, 34.7), (39, 53), (62, 82), (103, 136)),
    2: ((9.4, 10.1), (12.5, 14.5), (19.4, 24.2), (26, 33), (39, 49), (60, 78)),
    4: ((9.6, 10.2), (11.2, 12.5), (14.6, 17.3), (17.7, 21.4), (24, 30), (36, 44)),
    8: ((9.9, 10.4), (10.7, 11.6), (12.4, 14.0), (13.8, 15.8), (17.3, 20.2), (23, 28)),
    16: ((10.2, 10.7), (10.8, 11.4), (11.4, 12.3), (12.1, 13.3), (14.2, 15.8), (17.6, 20.0)),
    64: ((11.0, 11.4), (11.2, 11.7), (11.2, 11.7), (11.3, 11.8), (11.9, 12.5), (12.9, 13.7)),
}
LOADS = st.builds(
    lambda ranks, running, context: balanced_load(ranks, running, context),
    st.integers(1, 256),
    st.integers(1, 4096),
    st.integers(1, 32_768),
)


@pytest.mark.parametrize("num_ranks", TABLE_MS)
@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_the_table_of_model_values(num_ranks: int, column: int) -> None:
    num_running, context = COLUMNS[column]
    load = balanced_load(num_ranks, num_running, context)
    for spec, expected_ms in zip((H200, H100), TABLE_MS[num_ranks][column], strict=True):
        clock = GpuClock(spec=spec.scaled(fixed_s=TABLE_T0_S / spec.fixed_s))
        assert 1e3 * clock.decode_s(load) == pytest.approx(expected_ms, rel=0.03)


def test_published_speed_of_one_response() -> None:
    # 137 tokens/s on one H20 for this model; the constant for launches was fitted to it.
    speed = 1 / make_clock("h20").decode_s(balanced_load(1, 1, 1024))
    assert speed == pytest.approx(137, rel=0.05)


def test_a_switch_costs_a_stall_and_the_experts_that_change_hands() -> None:
    clock = GpuClock()
    assert clock.switch_s(8, 4) == pytest.approx(0.3 + 54 * 2**30 / 8 / 100e9)
    assert clock.switch_s(4, 8) == clock.switch_s(8, 4)
    assert clock.switch_s(4, 2) > clock.switch_s(8, 4)


@given(LOADS, st.sampled_from(sorted(GPUS)))
@settings(max_examples=60)
def test_more_load_never_takes_less_time(load: GroupLoad, name: str) -> None:
    clock = make_clock(name)
    base = clock.decode_s(load)
    for changes in ({"max_context_tokens": 1000}, {"max_running": 1}, {"num_running": 1}):
        values = {
            field: getattr(load, field) + changes.get(field, 0)
            for field in ("num_ranks", "num_running", "max_running", "max_context_tokens")
        }
        assert clock.decode_s(GroupLoad(**values)) >= base


def test_the_tail_shrinks_almost_for_nothing_and_a_full_batch_does_not() -> None:
    clock = GpuClock()

    def growth(num_running: int, context: int) -> float:
        small, large = (clock.decode_s(balanced_load(size, num_running, context)) for size in (2, 8))
        return small / large

    assert 1.1 < growth(8, 8192) < 1.25
    assert growth(512, 2048) > 2.0


def test_neutral_counts_iterations_whatever_they_do() -> None:
    clock = NeutralClock()
    assert clock.decode_s(balanced_load(8, 512, 9000)) == clock.decode_s(balanced_load(1, 1, 1)) == 1.0
    assert (clock.prefill_s(5000), clock.switch_s(8, 2)) == (0.0, 0.0)


def test_a_token_may_stand_for_many() -> None:
    inner, load = GpuClock(), balanced_load(4, 64, 100)
    clock = ScaledClock(clock=inner, model_tokens_per_token=20)
    assert clock.decode_s(load) == pytest.approx(20 * inner.decode_s(balanced_load(4, 64, 2000)))
    assert clock.prefill_s(50) == inner.prefill_s(1000)
    assert clock.switch_s(4, 2) == inner.switch_s(4, 2)
    assert "h200" in clock.name
    assert "20" in clock.name
    with pytest.raises(ValueError, match="model_tokens_per_token=0"):
        ScaledClock(clock=inner, model_tokens_per_token=0)


class _OneByOne:
    """A clock without arrays."""

    name = "plain"

    def decode_s(self, load: GroupLoad) -> float:
        return load.num_ranks + 10.0 * load.max_running

    def prefill_s(self, max_new_tokens: int) -> float:
        return 0.0

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        return 0.0


@pytest.mark.parametrize("clock", [GpuClock(), NeutralClock(), _OneByOne()])
def test_arrays_are_priced_as_one_by_one(clock: Clock) -> None:
    each = [balanced_load(*values) for values in ((1, 1, 50), (8, 100, 2000), (3, 7, 900), (8, 100, 2000))]
    together = Loads(
        num_ranks=np.array([load.num_ranks for load in each], dtype=float),
        num_running=np.array([load.num_running for load in each], dtype=float),
        max_running=np.array([load.max_running for load in each], dtype=float),
        max_context_tokens=np.array([load.max_context_tokens for load in each], dtype=float),
    )
    assert decode_many_s(clock, together) == pytest.approx([clock.decode_s(load) for load in each])


def _random_loads(num: int) -> Loads:
    rng = np.random.default_rng(3)
    ranks, most = rng.integers(1, 5, num).astype(float), rng.integers(1, 33, num).astype(float)
    context = most * rng.integers(50, 400, num)
    return Loads(
        num_ranks=ranks, num_running=ranks * most * 0.8, max_running=most, max_context_tokens=context
    )


def test_a_fit_finds_the_coefficients_of_its_own_kind() -> None:
    loads = _random_loads(400)
    truth = FittedClock(
        name="truth",
        fixed_s=4e-3,
        per_rank_s=2e-3,
        per_running_s=0.0,
        per_max_running_s=1e-4,
        per_context_token_s=2e-7,
    )
    noise = np.exp(np.random.default_rng(4).normal(0, 0.02, 400))
    found = FittedClock.fit(loads, truth.decode_many_s(loads) * noise, name="box")
    assert found.name == "box"
    assert found.decode_many_s(loads) == pytest.approx(truth.decode_many_s(loads), rel=0.02)
    assert found.per_rank_s == pytest.approx(2e-3, rel=0.1)


def test_a_fit_never_has_negative_coefficients() -> None:
    loads = _random_loads(50)
    found = FittedClock.fit(loads, 0.05 - 0.001 * loads.max_running)
    assert found.per_max_running_s == found.per_context_token_s == 0.0
    assert found.fixed_s > 0
    with pytest.raises(ValueError, match="3 iterations"):
        FittedClock.fit(_random_loads(3), np.ones(3))


def _corrected(truth: GpuClock, *, num_ranks: Sequence[int], noise: float = 0.0) -> CorrectedClock:
    """After a thousand iterations of one response to 32 a rank."""
    clock, rng = CorrectedClock(clock=GpuClock()), np.random.default_rng(0)
    for _ in range(1000):
        size = int(rng.choice(num_ranks))
        load = balanced_load(size, size * int(rng.integers(1, 33)), 4000)
        factor = math.exp(noise * rng.standard_normal())
        clock.observe(
            num_ranks=size,
            predicted_s=clock.clock.decode_s(load),
            observed_s=factor * truth.decode_s(load),
        )
    return clock


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(
    "factors",
    [{"fixed_s": 2.0}, {"fixed_s": 0.5, "hop_s": 0.5}, {"hop_s": 3.0}, {"kv_efficiency": 0.5}],
    ids=str,
)
def test_a_corrected_clock_prices_sizes_that_it_has_not_seen(factors: dict[str, float], noise: float) -> None:
    truth = GpuClock(spec=H200.scaled(**factors))
    clock = _corrected(truth, num_ranks=[8], noise=noise)
    for load in (balanced_load(8, 64, 4000), balanced_load(4, 64, 4000), balanced_load(4, 4, 4000)):
        assert clock.decode_s(load) == pytest.approx(truth.decode_s(load), rel=0.06 + noise / 4)


def test_a_corrected_clock_learns_what_a_rank_holds_from_several_sizes() -> None:
    truth, load = GpuClock(spec=H200.scaled(weight_efficiency=0.5)), balanced_load(2, 16, 4000)
    by_one, by_three = (_corrected(truth, num_ranks=sizes).decode_s(load) for sizes in ([8], [8, 6, 4]))
    assert by_three == pytest.approx(truth.decode_s(load), rel=0.1)
    assert abs(by_three - truth.decode_s(load)) < abs(by_one - truth.decode_s(load))


def test_a_stall_hardly_corrects_a_clock() -> None:
    clock, load = _corrected(GpuClock(), num_ranks=[8]), balanced_load(8, 64, 4000)
    before_s = clock.decode_s(load)
    clock.observe(num_ranks=8, predicted_s=before_s, observed_s=100 * before_s)
    assert before_s < clock.decode_s(load) < 1.01 * before_s


def test_a_corrected_clock_that_saw_nothing_is_the_clock_itself() -> None:
    clock, load = CorrectedClock(clock=GpuClock()), balanced_load(4, 16, 1000)
    assert clock.decode_s(load) == GpuClock().decode_s(load)
    clock.observe(num_ranks=4, predicted_s=1.0, observed_s=2.0)
    assert decode_many_s(clock, Loads.of(load))[0] == pytest.approx(clock.decode_s(load))
    assert clock.decode_s(load) > GpuClock().decode_s(load)
    with pytest.raises(ValueError, match="observed_s=0"):
        clock.observe(num_ranks=4, predicted_s=1.0, observed_s=0.0)


def test_constants_are_scaled_by_name() -> None:
    spec = H200.scaled(fixed_s=2.0, hop_s=0.5)
    assert (spec.fixed_s, spec.hop_s, spec.flops_per_s) == (0.01, 15e-6, H200.flops_per_s)
    assert spec.name == "h200 (fixed_s x 2, hop_s x 0.5)"
    with pytest.raises(ValueError, match="hop_s"):
        H200.scaled(hops=2.0)


def test_unknown_clocks_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="neutral, h100, h200, h20"):
        make_clock("b300")
