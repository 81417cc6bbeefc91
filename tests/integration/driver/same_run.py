"""Whether a run that was broken off and resumed is the run that it would have been."""

from pathlib import Path

from flexfloor.report.metrics import read_metrics
from flexfloor.rollout.ledger import read_ledger, step_path

FIGURES = ("reward/mean", "reward/min", "reward/max", "train/loss", "train/grad_norm", "train/entropy")
TOLERANCE = 1e-4
"""Of logprobs, losses and gradient norms in float32: other batches, other orders of sums."""


def differences(one: Path, other: Path, num_steps: int) -> list[str]:
    """In words, what is not the same in the two run directories; empty for the same run."""
    found: list[str] = []
    records = [read_metrics(run_dir) for run_dir in (one, other)]
    for run_dir, own in zip((one, other), records, strict=True):
        steps = [record["rollout_step"] for record in own]
        if steps != list(range(num_steps)):
            found.append(f"{run_dir}: figures of steps {steps}, not of 0 to {num_steps - 1}")
    if found:
        return found
    for step in range(num_steps):
        found += _other_responses(one, other, step)
        for name in FIGURES:
            first, second = (own[step][name] for own in records)
            if abs(first - second) > TOLERANCE * max(1.0, abs(first)):
                found.append(f"step {step}: {name} is {first} in one, {second} in the other")
    return found


def lost_or_twice(run_dir: Path, num_steps: int) -> tuple[int, int]:
    """Responses that have not finished, and finishes that came a second time."""
    lost = twice = 0
    for step in range(num_steps):
        state = read_ledger(step_path(run_dir / "ledger", step)).state
        assert state.opened is not None
        lost += state.opened.num_responses - state.num_finished
        twice += state.num_duplicates
    return lost, twice


def _other_responses(one: Path, other: Path, step: int) -> list[str]:
    states = [read_ledger(step_path(run_dir / "ledger", step)).state for run_dir in (one, other)]
    first, second = ({item.response_id: item for item in state.finished_responses()} for state in states)
    if first.keys() != second.keys():
        return [f"step {step}: {len(first.keys() ^ second.keys())} responses are in one run only"]
    found = [
        f"step {step}: the tokens of {name} differ"
        for name in first
        if first[name].token_ids != second[name].token_ids
    ]
    far = max(
        (
            abs(a - b)
            for name in first
            for a, b in zip(first[name].logprobs, second[name].logprobs, strict=False)
        ),
        default=0.0,
    )
    return found or ([f"step {step}: a logprob is {far} off"] if far > TOLERANCE else [])
