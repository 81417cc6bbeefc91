"""What the predictor makes of observations: values where they can be worked out, known worlds elsewhere."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from length_worlds import World, observe

from flexfloor.scheduling.calibration import calibration, rank_correlation
from flexfloor.scheduling.observation import LengthObservation, by_step
from flexfloor.scheduling.predict import Predictor

CAP = 16_384


def spread_prompts(cap: int = CAP) -> list[LengthObservation]:
    """60 prompts of 250 to 4000 tokens, geometric mean 1000."""
    bases = [250, 500, 1000, 1000, 2000, 4000]
    return [
        one
        for prompt in range(60)
        for one in observe(str(prompt), [int(f * bases[prompt % 6]) for f in (0.7, 1, 1.4)], cap=cap)
    ]


def test_before_anything_is_seen_all_prompts_are_alike() -> None:
    predictor = Predictor(cap_tokens=CAP)
    assert predictor.predict("a") == predictor.predict("b", prompt_tokens=900)
    assert predictor.num_seen("a") == 0
    assert predictor.rank_correlation is None
    assert predictor.predict("a").mean_log == pytest.approx(math.log(CAP / 8), abs=0.02)
    assert predictor.predict("a").cap_share == pytest.approx(0.005)


def test_a_new_prompt_is_what_is_usual_in_the_dataset() -> None:
    predictor = Predictor(cap_tokens=CAP)
    predictor.observe([one for p in range(64) for one in observe(str(p), [600] * 4)])
    new = predictor.predict("new")
    assert math.exp(new.mean_log) == pytest.approx(600, rel=0.05)
    assert predictor.num_seen("new") == 0
    assert predictor.level_tokens == pytest.approx(600, rel=0.05)


def test_one_sample_moves_a_prediction_part_of_the_way_and_more_samples_further() -> None:
    means = []
    for num in (1, 4, 16):
        predictor = Predictor(cap_tokens=CAP)
        predictor.observe([*spread_prompts(), *observe("long", [4000] * num)])
        means.append(predictor.predict("long").mean_log)
        assert predictor.num_seen("long") == num
    assert math.log(1000) < means[0] < means[1] < means[2] < math.log(4000)
    assert means[2] - means[0] > 0.02


def test_more_samples_make_a_prediction_surer() -> None:
    world = World(seed=1, num_prompts=128)
    predictor = Predictor(cap_tokens=CAP)
    for step in world.run_pass(0):
        predictor.observe(step)
    few = predictor.predict("0").sd_log
    for pass_index in (1, 2):
        for step in world.run_pass(pass_index):
            predictor.observe(step)
    assert math.sqrt(predictor.variances.within) < predictor.predict("0").sd_log < few
    assert few < predictor.predict("new").sd_log


def test_variances_are_found_whatever_the_starting_shares() -> None:
    sigma_squared = 0.9**2
    for shares in ((0.55, 0.08, 0.37), (0.8, 0.05, 0.15), (0.1, 0.1, 0.8)):
        world = World(seed=2, num_prompts=512, shares=shares, cap=10**6)
        predictor = Predictor(cap_tokens=10**6)
        for pass_index in range(3):
            for step in world.run_pass(pass_index, batch=64):
                predictor.observe(step)
        found = predictor.variances
        assert found.between / sigma_squared == pytest.approx(shares[0], abs=0.08)
        assert found.passes / sigma_squared == pytest.approx(shares[1], abs=0.04)
        assert found.within / sigma_squared == pytest.approx(shares[2], abs=0.04)


@pytest.mark.parametrize("cap", [CAP, 8_192], ids=["rarely capped", "often capped"])
def test_with_history_predictions_rank_and_cover(cap: int) -> None:
    world = World(seed=3, cap=cap, median=1800 if cap == CAP else 3000, runaway_share=0.01)
    predictor = Predictor(cap_tokens=cap)
    for pass_index in range(2):
        for step in world.run_pass(pass_index):
            predictor.observe(step)
    order = world.begin_pass()
    lengths = {str(prompt): world.lengths(prompt, 8) for prompt in order}
    figures = calibration({name: predictor.predict(name) for name in lengths}, lengths)
    assert figures["rank_correlation"] > 0.75
    assert figures["coverage_p90"] > 0.86
    assert abs(figures["bias_log"]) < 0.15
    assert predictor.rank_correlation == pytest.approx(figures["rank_correlation"], abs=0.12)


def test_a_second_pass_begins_with_a_forecast_of_its_rank_correlation() -> None:
    for shares, low, high in (((0.55, 0.08, 0.37), 0.7, 0.9), ((0.0, 0.0, 1.0), 0.0, 0.3)):
        world = World(seed=8, shares=shares)
        predictor = Predictor(cap_tokens=CAP)
        assert predictor.window_rank_correlation(["0", "1"]) is None
        for step in world.run_pass(0):
            predictor.observe(step)
        assert predictor.rank_correlation is None
        forecast = predictor.window_rank_correlation([str(p) for p in range(64)])
        assert forecast is not None
        assert low < forecast < high
        assert predictor.window_rank_correlation(["0", "new", "newer"]) is None
        for step in world.run_pass(1):
            predictor.observe(step)
        measured = predictor.rank_correlation
        assert measured == predictor.window_rank_correlation(["0"])
        assert measured == pytest.approx(forecast, abs=0.25)


def test_pure_noise_has_no_rank_correlation() -> None:
    world = World(seed=4, shares=(0, 0, 1))
    predictor = Predictor(cap_tokens=CAP)
    for pass_index in range(3):
        for step in world.run_pass(pass_index):
            predictor.observe(step)
    assert predictor.rank_correlation is not None
    assert abs(predictor.rank_correlation) < 0.25


def test_a_batch_of_short_prompts_does_not_look_like_a_terser_model() -> None:
    world = World(seed=5)
    predictor = Predictor(cap_tokens=CAP)
    for step in world.run_pass(0):
        predictor.observe(step)
    world.begin_pass()
    shortest_first = np.argsort(world.prompt_means)
    for start in range(0, world.num_prompts // 2, 32):
        predictor.observe(world.run_step([int(p) for p in shortest_first[start : start + 32]], 1))
    assert predictor.level_tokens == pytest.approx(1800, rel=0.15)


def test_drift_of_the_model_is_taken_out_of_prompts() -> None:
    """Lengths double over seven steps; prompts that were not drawn again are predicted twice as long too."""
    predictor = Predictor(cap_tokens=CAP)
    first = {str(p): 400 + 5 * (37 * p % 256) for p in range(256)}
    predictor.observe([one for name, length in first.items() for one in observe(name, [length] * 8)])
    for step in range(1, 8):
        drawn = [str(p) for p in range(32 * step - 32, 32 * step)]
        longer = [(name, round(first[name] * 1.104**step)) for name in drawn]
        predictor.observe([o for n, x in longer for o in observe(n, [x] * 8, step=step, pass_index=1)])
    assert math.exp(predictor.predict("255").mean_log) == pytest.approx(2 * first["255"], rel=0.05)


def test_steady_drift_is_followed() -> None:
    world = World(seed=6, drift_per_step=0.03)
    predictor = Predictor(cap_tokens=CAP)
    for pass_index in range(2):
        for step in world.run_pass(pass_index):
            predictor.observe(step)
    assert math.log(predictor.level_tokens) == pytest.approx(math.log(1800) + 0.03 * 15, abs=0.12)


def test_another_run_may_be_another_model() -> None:
    predictor = Predictor(cap_tokens=CAP)
    lengths = {str(p): 300 + 10 * p for p in range(64)}
    for step in range(4):
        predictor.observe([o for n, x in lengths.items() for o in observe(n, [x] * 4, step=step)])
    before = predictor.predict("63")
    few = [o for n in ("1", "20", "40") for o in observe(n, [4 * lengths[n]] * 4, run_id="larger model")]
    predictor.observe(few)
    assert predictor.predict("63").mean_log - before.mean_log == pytest.approx(math.log(4), abs=0.1)


def test_an_older_pass_counts_half() -> None:
    predictor = Predictor(cap_tokens=CAP)
    for pass_index in range(3):
        predictor.observe(observe("a", [500] * 8, step=pass_index, pass_index=pass_index))
    assert predictor.num_seen("a") == 8 * (1 + 0.5 + 0.25)
    predictor.observe(observe("a", [500] * 8, step=5, pass_index=5))
    assert predictor.num_seen("a") == 8 * (1 + 1.75 / 8)


def test_a_truncated_response_counts_in_the_cap_share_and_as_the_cap() -> None:
    predictor = Predictor(cap_tokens=1000)
    predictor.observe([o for p in range(32) for o in observe(str(p), [200] * 8, cap=1000)])
    none = predictor.predict("0")
    predictor.observe(observe("loops", [1000] * 6 + [200] * 2, step=1, cap=1000))
    loops = predictor.predict("loops")
    assert none.cap_share < 0.02
    assert loops.cap_share == pytest.approx(6 / 12, abs=0.05)
    assert loops.expected_tokens > 500
    assert loops.quantile_tokens(0.9) == 1000


def test_a_prompt_that_always_reaches_the_cap_is_expected_near_it() -> None:
    predictor = Predictor(cap_tokens=1000)
    for step in range(4):
        rest = [
            o for p in range(32) for o in observe(str(p), [200] * 8, step=step, pass_index=step, cap=1000)
        ]
        predictor.observe([*rest, *observe("loops", [1000] * 8, step=step, pass_index=step, cap=1000)])
        assert predictor.predict("loops").expected_tokens > 800
        assert predictor.predict("loops").remaining_tokens(500) > 200
    assert predictor.predict("3").expected_tokens < 300


def test_a_response_that_a_lower_cap_ended_is_taken_as_longer_than_that() -> None:
    predictions = {}
    for cap in (2_000, CAP):
        predictor = Predictor(cap_tokens=CAP)
        predictor.observe(spread_prompts())
        cut = [replace(o, is_truncated=cap == 2_000, cap_tokens=cap) for o in observe("cut", [2_000] * 4)]
        predictor.observe([replace(o, rollout_step=1) for o in cut])
        predictions[cap] = predictor.predict("cut")
    assert predictions[2_000].mean_log > predictions[CAP].mean_log + 0.2
    assert predictions[2_000].cap_share > predictions[CAP].cap_share


def test_a_longer_response_than_the_cap_of_now_counts_as_capped() -> None:
    predictor = Predictor(cap_tokens=1000)
    predictor.observe(observe("a", [3000] * 8, cap=CAP))
    assert predictor.predict("a").cap_share > 0.6
    assert predictor.predict("a").expected_tokens <= 1000


def test_prompt_length_helps_with_new_prompts_where_it_says_something() -> None:
    rng = np.random.default_rng(0)
    for slope in (1.0, 0.0):
        predictor = Predictor(cap_tokens=CAP)
        step = []
        for prompt in range(256):
            size = int(rng.integers(50, 2000))
            mean = 6.5 + slope * math.log(size / 300) + rng.normal(0, 0.3)
            lengths = [int(math.exp(rng.normal(mean, 0.3))) + 1 for _ in range(4)]
            step += observe(str(prompt), lengths, prompt_tokens=size)
        predictor.observe(step)
        short, long = (predictor.predict("new", prompt_tokens=size).mean_log for size in (100, 1000))
        assert long - short == pytest.approx(slope * math.log(10), abs=0.25)
        assert predictor.predict("new").mean_log == pytest.approx(math.log(predictor.level_tokens), abs=0.05)


def test_a_predictor_is_of_one_dataset_and_takes_one_step_at_a_time() -> None:
    predictor = Predictor(cap_tokens=CAP)
    predictor.observe(observe("a", [10]))
    with pytest.raises(ValueError, match="2 datasets, code, math"):
        predictor.observe(observe("a", [10], dataset="code"))
    with pytest.raises(ValueError, match="several rollout steps"):
        predictor.observe([*observe("a", [10], step=1), *observe("a", [10], step=2)])
    predictor.observe([])
    assert predictor.num_seen("a") == 1


@pytest.mark.parametrize("arguments", [{"cap_tokens": 0}, {"cap_tokens": 1, "sigma": 0.0}])
def test_impossible_settings_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"cap_tokens=0|sigma=0\.0"):
        Predictor(**arguments)  # type: ignore[arg-type]


def test_replay_gives_the_same_predictor() -> None:
    world = World(seed=7, num_prompts=64)
    live, history = Predictor(cap_tokens=CAP), list[LengthObservation]()
    for pass_index in range(2):
        for step in world.run_pass(pass_index, batch=16):
            live.observe(step)
            history += step
    again = Predictor.from_history(history, cap_tokens=CAP)
    assert [again.predict(str(p)) for p in range(65)] == [live.predict(str(p)) for p in range(65)]
    assert again.rank_correlation == live.rank_correlation
    assert sum(1 for _ in by_step(history)) == 8


steps = st.lists(
    st.dictionaries(
        st.sampled_from("abcdef"), st.lists(st.integers(0, 500), min_size=1, max_size=4), min_size=1
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, cap=st.sampled_from([1, 40, 400]))
@example(steps=[{"a": [0, 0, 282, 370], "b": [186], "c": [0, 191]}, {"a": [0, 202]}], cap=400)
def test_predictions_stay_within_bounds_for_any_history(steps: list[dict[str, list[int]]], cap: int) -> None:
    predictor = Predictor(cap_tokens=cap)
    for index, step in enumerate(steps):
        drawn = [
            one
            for name, lengths in step.items()
            for one in observe(name, lengths, step=index, pass_index=index // 2, cap=500, prompt_tokens=3)
        ]
        predictor.observe(drawn)
        for name in ("a", "new"):
            expected = predictor.predict(name)
            assert 0 <= expected.mean_log <= math.log(cap)
            assert 0 < expected.cap_share < 1
            assert 0 < expected.sd_log < 10
            assert 0 < expected.expected_tokens <= cap
            assert 1 <= expected.quantile_tokens(0.5) <= expected.quantile_tokens(0.9) <= cap
        correlation = predictor.rank_correlation
        assert correlation is None or -1.0001 <= correlation <= 1.0001


@given(st.lists(st.integers(0, 5), min_size=3, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_rank_correlation_is_symmetric_and_blind_to_monotone_changes(values, random) -> None:
    other = values[:]
    random.shuffle(other)
    correlation = rank_correlation(values, other)
    assert correlation == rank_correlation(other, values)
    stretched = rank_correlation([math.exp(v) for v in values], other)
    if correlation is not None:
        assert stretched == pytest.approx(correlation)
