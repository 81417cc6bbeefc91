"""slime's own loop around our two functions: the real slime where it is installed, else its stand-in."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_engine import FIRST_TOKEN, KEY, FakeEngine, serving

from flexfloor.errors import DeadlineExceeded
from flexfloor.integrations import slime_rollout
from flexfloor.integrations.server_control import ServerRefused
from flexfloor.scheduling.history import LengthHistory

STAND_IN = Path(__file__).parents[2] / "contracts" / "stand_in"
OURS = "flexfloor.integrations.slime_rollout."


@pytest.fixture(autouse=True)
def slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a slime of its own, as it keeps one state for the process."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(slime_rollout, "_lengths", None)
    yield
    for name in [name for name in sys.modules if name == "slime" or name.startswith("slime.")]:
        del sys.modules[name]


class Source:
    """Groups of two samples for the prompts given, in order; what came back goes first."""

    def __init__(self, prompts: list[str]) -> None:
        self.prompts = prompts
        self.epoch_id = 0
        self.num_given = 0
        self.returned: list[list[Any]] = []
        self.num_calls = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        from slime.utils.types import Sample

        self.num_calls += 1
        groups = []
        for prompt in self.prompts[self.num_given : self.num_given + num_samples]:
            first = 2 * self.num_given
            groups.append([Sample(index=first + k, prompt=prompt, label="x") for k in range(2)])
            self.num_given += 1
        return groups

    def add_samples(self, groups: list[list[Any]]) -> None:
        self.returned += groups


def arguments(engine: FakeEngine, **more: Any) -> Namespace:
    values = {
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": engine.port,
        "custom_generate_function_path": OURS + "generate",
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 4,
        "rollout_max_response_len": 20,
        "use_rollout_routing_replay": False,
        "drop_group": lambda group: False,
        "flexfloor_admin_key": KEY,
    }
    return Namespace(**{**values, **more})


def run(args: Namespace, source: Any, *, step: int = 3, evaluation: bool = False) -> Any:
    from slime.rollout.base_types import call_rollout_fn
    from slime.utils.misc import load_function

    return call_rollout_fn(
        load_function(OURS + "generate_rollout"), args, step, source, evaluation=evaluation
    )


def test_a_step_gives_what_slime_expects_and_every_rank_is_back() -> None:
    with serving(FakeEngine()) as engine:
        source = Source(["a5", "b3", "c20", "d1"])
        output = run(arguments(engine), source)
    assert [[sample.response_length for sample in group] for group in output.samples] == [
        [5, 5], [3, 3], [20, 20], [1, 1]
    ]  # fmt: skip
    assert {sample.reward for group in output.samples for sample in group} == {1.0}
    assert all(
        len(one.rollout_log_probs) == len(one.loss_mask) == one.response_length
        for group in output.samples
        for one in group
    )
    assert Counter(payload["routed_dp_rank"] for payload in engine.asked) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert [mark["action"] for mark in engine.marks] == ["begin", "end"]
    assert engine.marks[0]["rollout_step"] == 3
    assert engine.members == [0, 1, 2, 3]
    assert output.metrics == {
        "own": 1,
        "flexfloor/wall_s": 2.0,
        "flexfloor/occupied_worker_s": 5.0,
        "flexfloor/static_occupied_worker_s": 8.0,
        "flexfloor/response_tokens": 40,
        "flexfloor/worker_iterations": 30,
        "flexfloor/static_worker_iterations": 48,
        "flexfloor/num_releases": 1,
    }


def test_figures_of_several_servers_are_added_and_both_get_work() -> None:
    with serving(FakeEngine(num_ranks=2)) as one, serving(FakeEngine(num_ranks=2)) as other:
        args = arguments(one, flexfloor_engine_urls=[one.url, other.url])
        output = run(args, Source(["a5", "b3", "c9", "d1"]))
    assert output.metrics["flexfloor/occupied_worker_s"] == 10.0
    assert output.metrics["flexfloor/wall_s"] == 2.0
    assert len(one.asked) == len(other.asked) == 4


def test_a_response_that_lost_its_rank_goes_on_where_it_was() -> None:
    with serving(FakeEngine(lost_at={"a12": [5, 0, 3]})) as engine:
        args = arguments(engine, rollout_batch_size=1, over_sampling_batch_size=1)
        output = run(args, Source(["a12"]))
    assert len(engine.asked) == 5
    for payload in engine.asked:
        assert payload["sampling_params"]["max_new_tokens"] == 20 - (len(payload["input_ids"]) - 3)
    # Only first attempts name a rank: another one may be gone as well.
    assert sum("routed_dp_rank" in payload for payload in engine.asked) == 2
    for sample in output.samples[0]:
        assert sample.tokens[3:] == list(range(FIRST_TOKEN, FIRST_TOKEN + 12))
        assert sample.status.value == "completed"
        assert len(sample.rollout_log_probs) == len(sample.loss_mask) == sample.response_length == 12


def test_a_lost_response_at_its_cap_is_truncated() -> None:
    with serving(FakeEngine(lost_at={"a30": [20, 20]})) as engine:
        args = arguments(engine, rollout_batch_size=1, over_sampling_batch_size=1)
        output = run(args, Source(["a30"]))
    assert [sample.status.value for sample in output.samples[0]] == ["truncated", "truncated"]
    assert len(engine.asked) == 2


def test_a_response_is_not_continued_for_ever() -> None:
    with serving(FakeEngine(lost_at={"a12": [1] * 12})) as engine:
        args = arguments(engine, rollout_batch_size=1, over_sampling_batch_size=1, flexfloor_max_resubmits=2)
        output = run(args, Source(["a12"]))
    assert [sample.status.value for sample in output.samples[0]] == ["aborted", "aborted"]
    assert len(engine.asked) == 6


def test_what_slime_aborts_goes_back_to_its_source() -> None:
    with serving(FakeEngine(held=frozenset({"c7"}))) as engine:
        source = Source(["a5", "b3", "c7"])
        args = arguments(engine, rollout_batch_size=2, over_sampling_batch_size=3)
        output = run(args, source)
    assert [group[0].prompt for group in output.samples] == ["a5", "b3"]
    assert [[sample.status.value for sample in group] for group in source.returned] == [["aborted"] * 2]
    assert len(engine.asked_of("c7")) == 2


def test_a_later_batch_goes_to_ranks_that_are_still_there() -> None:
    with serving(FakeEngine()) as engine:
        dropped: list[str] = []

        def drop(group: list[Any]) -> bool:
            # The first two are dropped, so that slime asks for more, when two ranks have left.
            engine.routed = engine.members = [0, 1]
            dropped.append(group[0].prompt)
            return len(dropped) <= 2

        args = arguments(engine, drop_group=drop)
        output = run(args, Source(["a1", "b2", "c3", "d4", "e5", "f6", "g7", "h8"]))
    assert len(output.samples) == 4
    late = [payload["routed_dp_rank"] for prompt in ("e5", "f6") for payload in engine.asked_of(prompt)]
    assert set(late) <= {0, 1}
    assert engine.members == [0, 1, 2, 3]


def test_evaluation_is_a_step_of_its_own_and_names_no_rank() -> None:
    with serving(FakeEngine()) as engine:
        samples = Source(["a5", "b3"]).get_samples(2)
        args = arguments(engine, eval_samples=[one for group in samples for one in group])
        output = run(args, Source([]), evaluation=True)
    assert [one.response_length for one in output.data["set"]["samples"]] == [5, 5, 3, 3]
    assert not any("routed_dp_rank" in payload for payload in engine.asked)
    assert [mark["action"] for mark in engine.marks] == ["begin", "end"]


def test_lengths_are_kept_and_place_the_next_step(tmp_path: Path) -> None:
    history = tmp_path / "lengths.sqlite"
    prompts = ["a20", "b1", "c1", "d20"]
    with serving(FakeEngine(num_ranks=2)) as engine:
        args = arguments(engine, flexfloor_history=str(history), flexfloor_run_id="run")
        run(args, Source(prompts), step=0)
        engine.asked.clear()
        second = Source(prompts)
        second.epoch_id = 1
        run(args, second, step=1)
    with LengthHistory.open(history, must_exist=True) as file:
        kept = file.read("slime")
    assert len(kept) == 16
    assert {one.num_tokens for one in kept} == {20, 1}
    assert {(one.pass_index, one.rollout_step, one.weight_version) for one in kept} == {(0, 0, 7), (1, 1, 7)}
    # Long and short ones: each rank has as many of each.
    long = [p["routed_dp_rank"] for name in ("a20", "d20") for p in engine.asked_of(name)]
    assert sorted(long) == [0, 0, 1, 1]


def test_the_generate_function_works_without_the_rollout_function() -> None:
    from slime.rollout import sglang_rollout

    with serving(FakeEngine(lost_at={"a12": [5]})) as engine:
        args = arguments(engine, rollout_batch_size=1, over_sampling_batch_size=1)
        output = sglang_rollout.generate_rollout(args, 0, Source(["a12"]))
    assert [sample.response_length for sample in output.samples[0]] == [12, 12]
    assert not any("routed_dp_rank" in payload for payload in engine.asked)
    assert engine.marks == []


def test_images_go_through_slimes_own_function() -> None:
    from slime.utils.types import Sample

    class Images(Source):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            groups = super().get_samples(num_samples)
            for group in groups:
                group[0].multimodal_inputs = {"images": ["image"]}
                group[1].multimodal_inputs = {"images": None}
            return groups

    with serving(FakeEngine()) as engine:
        args = arguments(engine, rollout_batch_size=1, over_sampling_batch_size=1)
        output = run(args, Images(["a5"]))
    assert [sample.response_length for sample in output.samples[0]] == [5, 5]
    assert sum("routed_dp_rank" in payload for payload in engine.asked) == 1


def test_a_step_that_its_driver_never_ended_is_ended_first() -> None:
    with serving(FakeEngine(is_begun=True)) as engine:
        run(arguments(engine), Source(["a5", "b3", "c2", "d1"]))
    assert [mark["action"] for mark in engine.marks] == ["begin", "end", "begin", "end"]


def test_a_server_that_needs_longer_is_asked_again() -> None:
    with serving(FakeEngine(num_timeouts=2)) as engine:
        run(arguments(engine), Source(["a5", "b3", "c2", "d1"]))
    assert [mark["action"] for mark in engine.marks] == ["begin", "end", "end", "end"]


def test_the_step_ends_also_when_the_rollout_fails() -> None:
    def fail(group: list[Any]) -> bool:
        raise RuntimeError("the filter failed")

    with serving(FakeEngine()) as engine:
        with pytest.raises(RuntimeError, match="the filter failed"):
            run(arguments(engine, drop_group=fail), Source(["a5", "b3", "c2", "d1"]))
        assert not engine.is_begun
        assert slime_rollout._source is None


def test_a_rank_that_does_not_come_back_is_an_error() -> None:
    """slime's next call is a weight update, which that rank would miss."""
    away = "ep_rank 2 is parked, so a weight update would not reach it"
    with serving(FakeEngine(stays_away=(2,))) as engine, pytest.raises(ServerRefused, match=away):
        run(arguments(engine), Source(["a5", "b3", "c2", "d1"]))


@pytest.mark.parametrize(
    ("engine", "more", "text"),
    [
        (FakeEngine(has_routes=False), {}, "Not Found"),
        (FakeEngine(), {"flexfloor_admin_key": "wrong"}, "give the server's admin key"),
        (
            FakeEngine(),
            {"flexfloor_engine_urls": ["http://127.0.0.1:1"]},
            "POST http://127.0.0.1:1/flexfloor",
        ),
    ],
    ids=["no routes", "wrong key", "nobody there"],
)
def test_a_server_that_cannot_be_used_is_named(engine: FakeEngine, more: dict[str, Any], text: str) -> None:
    with serving(engine), pytest.raises(ServerRefused, match=text):
        run(arguments(engine, **more), Source(["a5", "b3", "c2", "d1"]))


def test_the_wait_for_ranks_has_a_deadline() -> None:
    with serving(FakeEngine(num_timeouts=10**9)) as engine:
        args = arguments(engine, flexfloor_rejoin_timeout_s=0.2)
        with pytest.raises((ServerRefused, DeadlineExceeded)):
            run(args, Source(["a5", "b3", "c2", "d1"]))


def test_a_misspelt_key_is_refused_before_anything_begins() -> None:
    with serving(FakeEngine()) as engine:
        with pytest.raises(ValueError, match="flexfloor_histroy: no such key"):
            run(arguments(engine, flexfloor_histroy="x"), Source([]))
        assert engine.marks == []
