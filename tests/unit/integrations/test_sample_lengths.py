"""Lengths of slime's samples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flexfloor.data.length_dumps import answer_text
from flexfloor.data.records import content_id
from flexfloor.integrations.sample_lengths import SampleLengths, prompt_id_of


def sample(prompt: Any = "p", response_length: int = 0, **more: Any) -> SimpleNamespace:
    values = {"index": 1, "label": "x", "tokens": [0] * (4 + response_length), "weight_versions": []}
    return SimpleNamespace(prompt=prompt, response_length=response_length, **{**values, **more})


def lengths(history: str | None = None) -> SampleLengths:
    return SampleLengths(cap_tokens=100, history=history, dataset="d", run_id="run")


def finish(kept: SampleLengths, step: int, prompt: str, num_tokens: int, index: int) -> None:
    done = sample(prompt, num_tokens, index=index, weight_versions=["12"])
    kept.finished(done, rollout_step=step, pass_index=step, is_truncated=num_tokens >= 100)


def test_what_came_before_is_expected_again(tmp_path: Path) -> None:
    path = str(tmp_path / "h.sqlite")
    kept = lengths(path)
    unknown = kept.expected_tokens(sample("long"))
    for index in range(4):
        finish(kept, 0, "long", 90, index)
        finish(kept, 0, "short", 3, 10 + index)
    assert kept.expected_tokens(sample("long")) == unknown
    kept.end_step()
    assert kept.expected_tokens(sample("long")) > 3 * kept.expected_tokens(sample("short"))
    # Another process finds the same in the file.
    assert lengths(path).expected_tokens(sample("long")) == kept.expected_tokens(sample("long"))
    kept.end_step()


def test_a_response_that_runs_expects_what_is_left() -> None:
    kept = lengths()
    assert kept.expected_tokens(sample(response_length=99)) <= 1


def test_a_response_longer_than_the_cap_counts_as_the_cap() -> None:
    kept = lengths()
    finish(kept, 0, "p", 130, 1)
    kept.end_step()


def test_prompts_are_named_as_the_import_of_a_dump_names_them() -> None:
    rendered = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    expected = content_id("How many?", answer_text("3"))
    assert prompt_id_of(sample(rendered, label="3")) == expected
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": " How many? "}]
    assert prompt_id_of(sample(messages, label="3")) == expected
    assert prompt_id_of(sample(messages, label={"answer": 3})) != expected
    assert prompt_id_of(sample([{"role": "tool", "content": "t"}]))
