"""Response lengths to simulate: generated, or from logs. PURE.

The generator follows what reasoning models show: lengths of a prompt are log-normal around the prompt's own
mean, that mean moves a little from pass to pass, and a few responses, mostly of the hardest prompts, run
to the cap:

    ln(length) = ln(median) + drift x pass + prompt + (prompt, pass) + response

with the variance sigma^2 split over the three parts. The split 0.55 / 0.08 / 0.37 gives a correlation of
0.8 between a prompt's mean log lengths in neighbouring passes with 8 responses, which is an assumption:
published logs say that passes are alike, not how much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

HARDEST_SHARE = 0.1
"""Prompts that most of the runaways belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Every length that a run draws: the simulated model answers a prompt in a pass with these."""

    name: str
    prompt_ids: tuple[str, ...]
    prompt_tokens: NDArray[np.int64]
    """[num_prompts]"""
    lengths: NDArray[np.int64]
    """[num_passes, num_prompts, num_responses_per_prompt], 1 .. cap_tokens."""
    cap_tokens: int
    has_earlier_pass: bool = False
    """Pass 0 was made up from the others, to be learned from and not to be counted."""

    def __post_init__(self) -> None:
        if self.lengths.ndim != 3 or self.lengths.size == 0:
            raise ValueError(f"lengths are {self.lengths.shape}: passes, prompts and responses are needed")
        if self.lengths.shape[1] != len(self.prompt_ids) or self.prompt_tokens.shape != (self.num_prompts,):
            raise ValueError(f"{len(self.prompt_ids)} prompt ids for lengths of {self.lengths.shape}")
        if self.lengths.min() < 1 or self.lengths.max() > self.cap_tokens:
            raise ValueError(f"lengths must lie in 1 .. cap_tokens={self.cap_tokens}")

    @property
    def num_passes(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_responses_per_prompt(self) -> int:
        return int(self.lengths.shape[2])

    @property
    def truncated_share(self) -> float:
        return float((self.lengths >= self.cap_tokens).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A kind of workload, and the group that it was studied on."""

    name: str
    num_ranks: int
    num_prompts_per_step: int
    num_responses_per_prompt: int
    cap_tokens: int
    runaway_share: float
    """Responses that run to the cap whatever their prompt's mean."""
    median_tokens: float = 1800.0
    sigma: float = 0.9
    """Standard deviation of ln(length) over all responses that do not run away."""
    variance_split: tuple[float, float, float] = (0.55, 0.08, 0.37)
    """Between prompts, between passes of a prompt, within a group."""
    hard_share: float = 0.8
    """Of the runaways, those of the hardest tenth of the prompts; the rest may come anywhere."""
    drift_per_pass: float = 0.0
    """Growth of ln(length) of the whole model from pass to pass."""

    def with_prompt_share(self, share: float) -> "Regime":
        """The same spread with another part of it between prompts: how predictable the tail is."""
        _, between_passes, within = self.variance_split
        rest = (1 - share) / (between_passes + within)
        return replace(self, variance_split=(share, between_passes * rest, within * rest))

    @property
    def num_responses(self) -> int:
        return self.num_prompts_per_step * self.num_responses_per_prompt


def _regime(
    name: str, num_ranks: int, prompts: int, samples: int, cap_k: int, runaways: float, **other: float
) -> Regime:
    return Regime(
        name=name,
        num_ranks=num_ranks,
        num_prompts_per_step=prompts,
        num_responses_per_prompt=samples,
        cap_tokens=cap_k * 1024,
        runaway_share=runaways,
        median_tokens=other.get("median", 1800.0),
        sigma=other.get("sigma", 0.9),
    )


REGIMES: Mapping[str, Regime] = {
    regime.name: regime
    for regime in (
        _regime("A", 8, 32, 8, 16, 0.01),
        _regime("B", 8, 128, 8, 16, 0.01),
        _regime("B0", 8, 128, 8, 16, 0.0),
        _regime("C", 8, 256, 8, 16, 0.01),
        _regime("D", 8, 64, 8, 32, 0.003, median=2800, sigma=1.0),
        # A third of the responses is cut off at the cap, as in published runs of thinking models.
        _regime("E", 8, 64, 8, 8, 0.0, median=5090, sigma=1.12),
        _regime("F", 16, 128, 8, 16, 0.01),
        _regime("G", 16, 256, 16, 32, 0.003),
        _regime("H", 64, 256, 8, 16, 0.005),
        _regime("I", 64, 512, 16, 32, 0.003),
        _regime("J", 256, 512, 8, 16, 0.002),
        _regime("P1", 8, 32, 8, 16, 0.003, median=700, sigma=0.75),
        _regime("P2", 16, 128, 8, 32, 0.003, median=2000, sigma=1.0),
        _regime("P3", 8, 64, 8, 32, 0.0, median=2000, sigma=1.0),
    )
}
"""Named after the study that fixed them; P1 to P3 have the idle share that papers report."""


def generate(regime: Regime, *, num_steps: int, num_passes: int, seed: int) -> Trace:
    """Lengths of `num_steps` steps' worth of prompts in every pass."""
    rng = np.random.default_rng(seed)
    num_prompts, samples = num_steps * regime.num_prompts_per_step, regime.num_responses_per_prompt
    of_prompt, of_pass, of_response = (regime.sigma * share**0.5 for share in regime.variance_split)
    prompt = rng.normal(0.0, of_prompt, num_prompts)
    log_length = np.log(regime.median_tokens) + prompt[None, :, None]
    log_length = log_length + rng.normal(0.0, of_pass, (num_passes, num_prompts, 1))
    log_length = log_length + rng.normal(0.0, of_response, (num_passes, num_prompts, samples))
    log_length += regime.drift_per_pass * np.arange(num_passes)[:, None, None]
    lengths = np.clip(np.rint(np.exp(log_length)), 1, regime.cap_tokens).astype(np.int64)
    runs_away = rng.random(lengths.shape) < _runaway_chances(regime, prompt)[None, :, None]
    lengths[runs_away] = regime.cap_tokens
    prompt_tokens = np.clip(np.rint(200 * np.exp(rng.normal(0.0, 0.5, num_prompts))), 16, 2048)
    return Trace(
        name=f"{regime.name}, seed {seed}",
        prompt_ids=tuple(f"p{index}" for index in range(num_prompts)),
        prompt_tokens=prompt_tokens.astype(np.int64),
        lengths=lengths,
        cap_tokens=regime.cap_tokens,
    )


def _runaway_chances(regime: Regime, prompt: NDArray[np.float64]) -> NDArray[np.float64]:
    """[num_prompts]; their mean is `runaway_share`."""
    num_hard = max(1, round(HARDEST_SHARE * len(prompt)))
    chances = np.full(len(prompt), regime.runaway_share * (1 - regime.hard_share))
    hardest = np.argsort(-prompt, kind="stable")[:num_hard]
    chances[hardest] += regime.runaway_share * regime.hard_share * len(prompt) / num_hard
    return np.asarray(np.minimum(chances, 1.0), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroup:
    """The responses that a prompt got in one pass, as a log has them."""

    prompt_id: str
    pass_index: int
    prompt_tokens: int
    lengths: tuple[int, ...]


def trace_from_groups(groups: Sequence[LoggedGroup], *, name: str, cap_tokens: int | None = None) -> Trace:
    """A trace from a log. ValueError where it has no responses, or more tokens than the cap.

    Logs have holes. A group that lacks responses, or a pass that lacks a prompt, is filled with draws that
    the same prompt got elsewhere in the log, in their order, so no length is made up. `cap_tokens` is the
    longest length where it is not given.
    """
    drawn: dict[str, dict[int, list[int]]] = {}
    prompt_tokens: dict[str, int] = {}
    for group in groups:
        if group.lengths:
            drawn.setdefault(group.prompt_id, {}).setdefault(group.pass_index, []).extend(group.lengths)
            prompt_tokens.setdefault(group.prompt_id, max(1, group.prompt_tokens))
    if not drawn:
        raise ValueError("there is no response in it")
    passes = sorted({index for by_pass in drawn.values() for index in by_pass})
    num_responses = max(len(lengths) for by_pass in drawn.values() for lengths in by_pass.values())
    lengths = np.array(
        [[_filled(by_pass, index, num_responses) for by_pass in drawn.values()] for index in passes],
        dtype=np.int64,
    )
    longest = int(lengths.max())
    if cap_tokens is not None and longest > cap_tokens:
        raise ValueError(f"a response has {longest} tokens, more than cap_tokens={cap_tokens}")
    return Trace(
        name=name,
        prompt_ids=tuple(drawn),
        prompt_tokens=np.array([prompt_tokens[prompt] for prompt in drawn], dtype=np.int64),
        lengths=lengths,
        cap_tokens=cap_tokens or longest,
    )


def _filled(by_pass: Mapping[int, Sequence[int]], pass_index: int, num_responses: int) -> list[int]:
    own = list(by_pass.get(pass_index, ()))
    others = [length for index, lengths in by_pass.items() if index != pass_index for length in lengths]
    pool = others or own
    missing = num_responses - len(own)
    return own + [pool[index % len(pool)] for index in range(missing)]


def with_earlier_pass(trace: Trace, *, seed: int) -> Trace:
    """The trace with a pass before it, so that a log of one pass can be scheduled with a warm history.

    Nothing of the log itself is handed on: every prompt's mean log length is drawn from what its own group
    says about it (normal posterior with the spread between prompts as the prior), then new responses are
    drawn around it. If the log-normal model held, the two passes would be as alike as real ones.
    """
    rng = np.random.default_rng(seed)
    log_length = np.log(trace.lengths[0])
    samples = trace.num_responses_per_prompt
    within = float(log_length.var(axis=1, ddof=1).mean()) if samples > 1 else float(log_length.var()) / 2
    between = max(0.0, float(log_length.mean(axis=1).var()) - within / samples)
    weight = between / (between + within / samples) if between > 0 else 0.0
    centre = float(log_length.mean())
    posterior_mean = centre + weight * (log_length.mean(axis=1) - centre)
    mean = posterior_mean + rng.normal(0.0, (weight * within / samples) ** 0.5, trace.num_prompts)
    drawn = mean[:, None] + rng.normal(0.0, within**0.5, (trace.num_prompts, samples))
    lengths = np.clip(np.rint(np.exp(drawn)), 1, trace.cap_tokens).astype(np.int64)
    return replace(trace, lengths=np.concatenate([lengths[None], trace.lengths]), has_earlier_pass=True)
