"""Which groups the trainer is asked for, when, and what becomes of its answers and failures."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from step_of import WEIGHT_VERSION, response, step_of

from flexfloor.config import AlgorithmConfig
from flexfloor.driver.ahead import LogprobsAhead
from flexfloor.errors import StaleWeightsError
from flexfloor.training.client import CallAbandoned, TrainerError
from flexfloor.training.messages import GroupLogprobs, LogprobGroup
from flexfloor.types import ResponseRequest, TrainerLogprobs, TrainSequence

DEADLINE_S = 20.0
PENALTY = AlgorithmConfig(num_minibatches=2, kl_coef=0.01)


@dataclass
class FakeTrainer:
    """Answers when it is let, with logprobs that say whose they are."""

    is_held: bool = False
    failure: Exception | None = None
    answers_with: Callable[[TrainerLogprobs], TrainerLogprobs] = field(default=lambda found: found)
    asked: list[list[str]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def group_logprobs(
        self,
        groups: Sequence[LogprobGroup],
        *,
        weight_version: int,
        needs_reference: bool,
        is_wanted: Callable[[], bool],
    ) -> GroupLogprobs:
        with self.changed:
            self.asked.append([group.sequences[0].response_id for group in groups])
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()
            end_s = time.monotonic() + DEADLINE_S
            while self.is_held:
                if not is_wanted():
                    raise CallAbandoned("given up")
                assert time.monotonic() < end_s
                self.changed.wait(0.01)
        if self.failure is not None:
            raise self.failure
        return GroupLogprobs(
            logprobs=[
                self.answers_with(_logprobs(one, weight_version, group.needs_old, needs_reference))
                for group in groups
                for one in group.sequences
            ],
            seconds=0.1,
        )

    def wait_asked(self, num_calls: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= num_calls, DEADLINE_S)

    def let_go(self) -> None:
        with self.changed:
            self.is_held = False
            self.changed.notify_all()


def _logprobs(
    sequence: TrainSequence, weight_version: int, needs_old: bool, needs_reference: bool
) -> TrainerLogprobs:
    value = float(sequence.prompt_token_ids[0])
    values = (value,) * len(sequence.response_token_ids)
    return TrainerLogprobs(
        response_id=sequence.response_id,
        weight_version=weight_version,
        old=values if needs_old else None,
        reference=values if needs_reference else None,
    )


@contextmanager
def ahead_of(
    requests: Sequence[ResponseRequest], trainer: FakeTrainer, algorithm: AlgorithmConfig = PENALTY
) -> Iterator[LogprobsAhead]:
    with LogprobsAhead(
        requests, trainer=trainer, algorithm=algorithm, weight_version=WEIGHT_VERSION
    ) as ahead:
        yield ahead


def finish(ahead: LogprobsAhead, requests: Sequence[ResponseRequest], num_tokens: int = 2) -> None:
    for request in requests:
        ahead.on_response(response(request, num_tokens))


def test_complete_groups_are_asked_for_once_a_worker_is_away_and_the_rest_after_the_end() -> None:
    requests, trainer = step_of(4, 2), FakeTrainer(is_held=True)
    with ahead_of(requests, trainer) as ahead:
        # Two groups complete, one half done.
        finish(ahead, requests[:5], num_tokens=3)
        ahead.left((2, 3))
        trainer.wait_asked(1)
        # It is busy: what completes meanwhile goes with the next call, and nobody waits for it here.
        finish(ahead, requests[5:6], num_tokens=3)
        trainer.let_go()
        trainer.wait_asked(2)
        ahead.recall((2, 3), wait=True)
        finish(ahead, requests[6:])
        ahead.rollout_ended()
        found, figures = ahead.results(), ahead.figures()
    assert trainer.asked == [["0/p0/0", "0/p1/0"], ["0/p2/0"], ["0/p3/0"]]
    assert len(trainer.threads) == 1
    assert threading.current_thread().name not in trainer.threads
    assert list(found) == [request.response_id for request in requests]
    # The second optimizer step holds the last two groups.
    assert [one.response_id for one in found.values() if one.old is not None] == [
        request.response_id for request in requests[4:]
    ]
    assert all(one.reference is not None for one in found.values())
    assert (figures.num_groups, figures.num_early_groups) == (4, 3)
    assert figures.early_token_share == pytest.approx(18 / 22)
    assert figures.saved_s > 0
    assert figures.late_s >= 0


def test_nothing_is_asked_for_while_all_workers_serve() -> None:
    requests, trainer = step_of(3, 2), FakeTrainer()
    with ahead_of(requests, trainer) as ahead:
        ahead.left((1,))
        # Late work woke it up.
        ahead.recall((1,), wait=False)
        finish(ahead, requests)
        ahead.rollout_ended()
        ahead.results()
        figures = ahead.figures()
    # One call for everything, so there was none before the end.
    assert trainer.asked == [["0/p0/0", "0/p1/0", "0/p2/0"]]
    assert (figures.num_early_groups, figures.early_token_share, figures.saved_s) == (0, 0.0, 0.0)
    assert figures.late_s > 0


def test_a_group_that_the_step_needs_nothing_of_is_not_asked_for() -> None:
    requests, trainer = step_of(4, 2), FakeTrainer()
    with ahead_of(requests, trainer, AlgorithmConfig(num_minibatches=2)) as ahead:
        ahead.left((1,))
        finish(ahead, requests)
        ahead.rollout_ended()
        found = ahead.results()
    assert sorted(name for call in trainer.asked for name in call) == ["0/p2/0", "0/p3/0"]
    assert [one.old is None for one in found.values()] == [True] * 4 + [False] * 4
    assert all(one.reference is None for one in found.values())


def test_an_optimizer_step_that_cuts_a_group_still_gets_the_whole_group() -> None:
    """Three groups of two in four steps: 6 * 1 // 4 = 1, so the first step ends inside the first group."""
    requests, trainer = step_of(3, 2), FakeTrainer()
    with ahead_of(requests, trainer, AlgorithmConfig(num_minibatches=4)) as ahead:
        finish(ahead, requests)
        ahead.rollout_ended()
        assert all(one.old is not None for one in ahead.results().values())


def test_a_step_that_is_given_up_waits_for_no_answer() -> None:
    requests, trainer = step_of(2, 2), FakeTrainer(is_held=True)
    started_s = time.monotonic()
    with ahead_of(requests, trainer) as ahead:
        finish(ahead, requests[:2])
        ahead.left((1,))
        trainer.wait_asked(1)
    assert trainer.is_held
    assert time.monotonic() - started_s < DEADLINE_S
    assert not [thread for thread in threading.enumerate() if thread.name in trainer.threads]


def test_a_failure_is_told_when_the_results_are_asked_for_and_not_before() -> None:
    requests, trainer = step_of(2, 2), FakeTrainer(failure=TrainerError("out of memory"))
    with ahead_of(requests, trainer) as ahead:
        ahead.left((1,))
        finish(ahead, requests[:2])
        trainer.wait_asked(1)
        finish(ahead, requests[2:])
        ahead.rollout_ended()
        with pytest.raises(TrainerError, match="out of memory"):
            ahead.results()


@pytest.mark.parametrize("change", [{"weight_version": WEIGHT_VERSION - 1}, {"response_id": "0/p9/9"}])
def test_answers_by_other_weights_or_for_others_are_refused(change: dict[str, object]) -> None:
    requests = step_of(1, 2)
    trainer = FakeTrainer(answers_with=lambda found: replace(found, **change))  # type: ignore[arg-type]
    with ahead_of(requests, trainer) as ahead:
        finish(ahead, requests)
        ahead.rollout_ended()
        with pytest.raises(StaleWeightsError, match=f"by weight_version {WEIGHT_VERSION}, the trainer"):
            ahead.results()
