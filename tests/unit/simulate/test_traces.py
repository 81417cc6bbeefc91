"""Generated lengths have the shape they were asked for; logs are read as they are, holes filled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.simulate.traces import (
    REGIMES,
    LoggedGroup,
    Trace,
    generate,
    trace_from_groups,
    with_earlier_pass,
)


def mean_logs(trace: Trace, pass_index: int) -> np.ndarray:
    return np.log(trace.lengths[pass_index]).mean(axis=1)


def test_neighbouring_passes_are_as_alike_as_the_variance_split_says() -> None:
    trace = generate(REGIMES["P3"], num_steps=32, num_passes=2, seed=5)
    # (0.55) / (0.55 + 0.08 + 0.37 / 8), before the cap cuts the longest.
    alike = np.corrcoef(mean_logs(trace, 0), mean_logs(trace, 1))[0, 1]
    assert alike == pytest.approx(0.813, abs=0.02)
    assert np.median(trace.lengths) == pytest.approx(2000, rel=0.05)
    assert np.log(trace.lengths).std() == pytest.approx(1.0, abs=0.05)


def test_runaways_sit_in_the_hardest_prompts() -> None:
    trace = generate(REGIMES["B"], num_steps=16, num_passes=1, seed=1)
    capped = trace.lengths[0] >= trace.cap_tokens
    plain = generate(REGIMES["B0"], num_steps=16, num_passes=1, seed=1)
    # The same draws without runaways: what is capped only now has run away.
    ran_away = capped & (plain.lengths[0] < plain.cap_tokens)
    hardest = np.argsort(-plain.lengths[0].mean(axis=1))[: len(plain.prompt_ids) // 5]
    assert ran_away.mean() == pytest.approx(0.01, abs=0.002)
    assert ran_away[hardest].sum() / ran_away.sum() > 0.65


def test_a_third_is_truncated_in_the_regime_made_for_it() -> None:
    trace = generate(REGIMES["E"], num_steps=8, num_passes=1, seed=0)
    assert trace.truncated_share == pytest.approx(1 / 3, abs=0.03)


def test_a_prompt_share_keeps_the_spread_and_moves_it_between_prompts() -> None:
    regime = REGIMES["P3"].with_prompt_share(0.8)
    assert sum(regime.variance_split) == pytest.approx(1.0)
    trace = generate(regime, num_steps=16, num_passes=2, seed=2)
    assert np.corrcoef(mean_logs(trace, 0), mean_logs(trace, 1))[0, 1] > 0.93


def test_a_seed_fixes_every_length() -> None:
    first, again, other = (
        generate(REGIMES["A"], num_steps=1, num_passes=2, seed=seed).lengths for seed in (3, 3, 4)
    )
    assert (first == again).all()
    assert (first != other).any()


def group(prompt_id: str, pass_index: int, *lengths: int) -> LoggedGroup:
    return LoggedGroup(prompt_id=prompt_id, pass_index=pass_index, prompt_tokens=7, lengths=lengths)


def test_a_log_becomes_a_trace_and_holes_take_the_same_prompts_other_draws() -> None:
    groups = [group("a", 0, 5, 6), group("b", 0, 9), group("a", 1, 7, 8), group("b", 1, 3, 4)]
    trace = trace_from_groups(groups, name="log", cap_tokens=20)
    assert trace.prompt_ids == ("a", "b")
    assert trace.lengths.tolist() == [[[5, 6], [9, 3]], [[7, 8], [3, 4]]]
    assert trace.prompt_tokens.tolist() == [7, 7]


@pytest.mark.parametrize(
    ("groups", "cap", "message"),
    [([], 10, "no response"), ([group("a", 0, 11)], 10, "11 tokens, more than cap_tokens=10")],
)
def test_a_log_that_cannot_be_is_refused(groups: list[LoggedGroup], cap: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace_from_groups(groups, name="log", cap_tokens=cap)


@settings(max_examples=30, deadline=None)
@given(
    drawn=st.dictionaries(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 2)),
        st.lists(st.integers(1, 50), min_size=1, max_size=4),
        min_size=1,
    )
)
def test_every_logged_length_is_in_the_trace(drawn: dict[tuple[str, int], list[int]]) -> None:
    trace = trace_from_groups([group(*key, *lengths) for key, lengths in drawn.items()], name="log")
    passes = sorted({index for _, index in drawn})
    for (prompt_id, index), lengths in drawn.items():
        row = trace.lengths[passes.index(index), trace.prompt_ids.index(prompt_id)]
        assert row[: len(lengths)].tolist() == lengths
        own = [length for (name, _), each in drawn.items() if name == prompt_id for length in each]
        assert set(row.tolist()) <= set(own)


def test_an_earlier_pass_is_as_alike_as_a_real_one_and_leaves_the_log_alone() -> None:
    real = generate(REGIMES["P3"], num_steps=16, num_passes=1, seed=8)
    trace = with_earlier_pass(real, seed=1)
    assert (trace.lengths[1] == real.lengths[0]).all()
    alike = np.corrcoef(mean_logs(trace, 0), mean_logs(trace, 1))[0, 1]
    # Shrinkage of a mean of 8 draws: (0.63) / (0.63 + 0.37 / 8).
    assert alike == pytest.approx(0.93, abs=0.03)
    assert np.log(trace.lengths[0]).std() == pytest.approx(np.log(real.lengths[0]).std(), rel=0.06)
