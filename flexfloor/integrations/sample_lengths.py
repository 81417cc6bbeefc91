"""Lengths of a foreign driver's responses: what placement expects of a prompt, and what came of it."""

import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from flexfloor.data.length_dumps import answer_text, user_text
from flexfloor.data.records import content_id
from flexfloor.scheduling.history import LengthHistory
from flexfloor.scheduling.observation import LengthObservation
from flexfloor.scheduling.predict import Predictor

logger = logging.getLogger(__name__)


class SampleLengths:
    """slime's samples in, expected tokens out. With a history file what was learnt outlives the run.

    Without one it still learns within the run, from the second pass over the data on.
    """

    def __init__(self, *, cap_tokens: int, history: str | None, dataset: str, run_id: str | None) -> None:
        self._cap_tokens = cap_tokens
        self._history = history
        self._dataset = dataset
        self._run_id = run_id or f"slime-{uuid.uuid4().hex[:12]}"
        self._step: list[LengthObservation] = []
        known: Sequence[LengthObservation] = ()
        if history is not None:
            with LengthHistory.open(history) as file:
                known = file.read(dataset, limit_passes=4)
        self._predictor = Predictor.from_history(known, cap_tokens=cap_tokens)

    def expected_tokens(self, sample: Any) -> float:
        """What is still to come of this sample."""
        prediction = self._predictor.predict(prompt_id_of(sample))
        if sample.response_length:
            return prediction.remaining_tokens(int(sample.response_length))
        return prediction.expected_tokens

    def finished(self, sample: Any, *, rollout_step: int, pass_index: int, is_truncated: bool) -> None:
        """A response has its end. Kept until `end_step`."""
        num_tokens = min(int(sample.response_length), self._cap_tokens)
        self._step.append(
            LengthObservation(
                dataset=self._dataset,
                prompt_id=prompt_id_of(sample),
                response_id=f"{rollout_step}/{sample.index}",
                run_id=self._run_id,
                rollout_step=rollout_step,
                weight_version=_weight_version(sample),
                pass_index=pass_index,
                num_tokens=num_tokens,
                prompt_tokens=max(0, len(sample.tokens) - int(sample.response_length)),
                is_truncated=is_truncated,
                cap_tokens=self._cap_tokens,
            )
        )

    def end_step(self) -> None:
        """Learn from the step's responses and keep them."""
        step, self._step = self._step, []
        if not step:
            return
        self._predictor.observe(step)
        if self._history is not None:
            with LengthHistory.open(self._history) as file:
                file.add(step)


def prompt_id_of(sample: Any) -> str:
    """As `flexfloor-history import --format slime` names the prompt, so that its histories serve here."""
    prompt = sample.prompt
    question = user_text(prompt) if isinstance(prompt, str) else _last_user_text(prompt)
    return content_id(question, answer_text(sample.label))


def _last_user_text(messages: Sequence[Any]) -> str:
    """Of a conversation that no template has rendered yet."""
    for message in reversed(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            return str(message["content"]).strip()
    return json.dumps(messages, sort_keys=True)


def _weight_version(sample: Any) -> int:
    """slime counts versions in texts; another kind of name says nothing here."""
    versions = list(getattr(sample, "weight_versions", ()) or ())
    return int(versions[-1]) if versions and str(versions[-1]).isdecimal() else 0
