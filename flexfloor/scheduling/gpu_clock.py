"""Time of a decode iteration on GPUs, as a formula of a group's load. PURE.

With m ranks, B running responses, b of them and C context tokens on the fullest rank, seconds:

    fixed + A(m) + a(m) b + W_d / (BW e_w) + E(m, B) w_e / (BW e_w)
          + 1.25 F_e B / (m P) + (F_d / P + 4 us) b + kv C / (BW e_kv)

    q        = 1 - (1 - active / experts)^max(1, 0.7 B)      0.7: responses share experts
    E(m, B)  = min(x, x q + sqrt(2 ln m x q (1 - q)))        x = experts / m; the fullest of m ranks
    A(m)     = layers 2 hop (1 + 0.15 log2 m)                0 for one rank
    a(m) 128 = layers (pair(m) - 2 hop) hidden / 7168        pair(m): dispatch and combine of 128 tokens

Weights of experts that no token needs are not read, hence E. One response alone reads all its `active`
experts, hence the max. pair(m) are the figures that DeepEP publishes for 8 to 256 H800 ranks; below 8 what
exceeds the latency floor shrinks with the share of bytes that leaves the rank, (m - 1) / m.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from flexfloor.scheduling.cost import GroupLoad
from flexfloor.scheduling.loads import Floats, Loads

_PAIR_S = ((8, 191e-6), (16, 313e-6), (32, 428e-6), (64, 487e-6), (128, 561e-6), (256, 554e-6))
"""Dispatch and combine, low-latency kernels, 128 tokens a rank, hidden size 7168 (DeepEP, H800 with CX7)."""
_PAIR_HIDDEN_SIZE = 7168
_PAIR_TOKENS = 128
_ROUTER_OVERLAP = 0.7
_EXPERT_IMBALANCE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNumbers:
    """What an iteration of a model reads and computes."""

    name: str
    num_layers: int
    num_experts: int
    num_active_experts: int
    hidden_size: int
    expert_bytes: int
    """Of one expert in all layers."""
    dense_read_bytes: float
    """Read in every iteration by every rank: attention and output head."""
    kv_bytes_per_token: int
    expert_flops_per_token: float
    dense_flops_per_token: float


QWEN3_30B_A3B = ModelNumbers(
    name="qwen3_30b_a3b",
    num_layers=48,
    num_experts=128,
    num_active_experts=8,
    hidden_size=2048,
    expert_bytes=432 * 2**20,
    dense_read_bytes=2.43e9,
    kv_bytes_per_token=96 * 1024,
    expert_flops_per_token=3.62e9,
    dense_flops_per_token=2.4e9,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Constants of one kind of GPU. Assumptions but for the bandwidth, which vendors state."""

    name: str
    memory_bytes_per_s: float
    flops_per_s: float
    """Reached, not peak."""
    fixed_s: float = 5e-3
    """Launches, small kernels, scheduler, sampling; fitted to published batch-1 speeds, +-40 %."""
    hop_s: float = 30e-6
    """Latency floor of one dispatch or combine; a guess within x/2 .. x2.7."""
    per_response_s: float = 4e-6
    weight_efficiency: float = 0.75
    kv_efficiency: float = 0.70
    prefill_tokens_per_s: float = 25_000.0
    """Of one rank."""
    switch_fixed_s: float = 0.3
    switch_bytes_per_s: float = 100e9
    """At which a survivor takes over experts."""

    def scaled(self, **factors: float) -> "GpuSpec":
        """Named constants times a factor, e.g. `scaled(fixed_s=2.0, hop_s=0.5)`; the name says so."""
        known = {name for name in self.__slots__ if name != "name"}
        if not factors or not factors.keys() <= known or min(factors.values()) <= 0:
            raise ValueError(f"{factors}: give a positive factor for some of {', '.join(sorted(known))}")
        values = {name: getattr(self, name) * factor for name, factor in factors.items()}
        label = ", ".join(f"{name} x {factor:g}" for name, factor in sorted(factors.items()))
        return replace(self, name=f"{self.name} ({label})", **values)


H100 = GpuSpec(name="h100", memory_bytes_per_s=3.35e12, flops_per_s=450e12)
H200 = GpuSpec(name="h200", memory_bytes_per_s=4.8e12, flops_per_s=450e12)
H20 = GpuSpec(
    name="h20", memory_bytes_per_s=4.0e12, flops_per_s=110e12, prefill_tokens_per_s=25_000.0 * 110 / 450
)
GPUS = {spec.name: spec for spec in (H100, H200, H20)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClock:
    """The formula above, for one kind of GPU and one model."""

    spec: GpuSpec = H200
    model: ModelNumbers = QWEN3_30B_A3B

    @property
    def name(self) -> str:
        return self.spec.name

    def decode_s(self, load: GroupLoad) -> float:
        return float(self.decode_many_s(Loads.of(load))[0])

    def decode_many_s(self, loads: Loads) -> Floats:
        spec, model = self.spec, self.model
        ranks, most = loads.num_ranks, loads.max_running
        weights_per_s = spec.memory_bytes_per_s * spec.weight_efficiency
        kv_per_s = spec.memory_bytes_per_s * spec.kv_efficiency
        read_bytes = model.dense_read_bytes + self._experts_read(loads) * model.expert_bytes
        expert_flops = _EXPERT_IMBALANCE * model.expert_flops_per_token * loads.num_running / ranks
        per_response = model.dense_flops_per_token / spec.flops_per_s + spec.per_response_s
        seconds = spec.fixed_s + self._hops_s(ranks) + self._payload_s(ranks) * most
        seconds = seconds + read_bytes / weights_per_s + expert_flops / spec.flops_per_s + per_response * most
        kv_s = model.kv_bytes_per_token * loads.max_context_tokens / kv_per_s
        return np.asarray(seconds + kv_s, dtype=np.float64)

    def prefill_s(self, max_new_tokens: int) -> float:
        return max_new_tokens / self.spec.prefill_tokens_per_s

    def switch_s(self, num_ranks_before: int, num_ranks_after: int) -> float:
        """A fixed stall, and the experts that a member of the smaller group takes over or hands on."""
        total = self.model.expert_bytes * self.model.num_experts
        moved = total * abs(1 / num_ranks_after - 1 / num_ranks_before)
        return self.spec.switch_fixed_s + moved / self.spec.switch_bytes_per_s

    def _experts_read(self, loads: Loads) -> Floats:
        """Of the fullest rank, in all layers alike."""
        model, running = self.model, loads.num_running
        draws = np.where(running > 0, np.maximum(1.0, _ROUTER_OVERLAP * running), 0.0)
        share = 1 - (1 - model.num_active_experts / model.num_experts) ** draws
        held = model.num_experts / loads.num_ranks
        spread = np.sqrt(2 * np.log(loads.num_ranks) * held * share * (1 - share))
        return np.asarray(np.minimum(held, held * share + spread), dtype=np.float64)

    def _hops_s(self, num_ranks: Floats) -> Floats:
        hops = self.model.num_layers * 2 * self.spec.hop_s * (1 + 0.15 * np.log2(num_ranks))
        return np.where(num_ranks > 1, hops, 0.0)

    def _payload_s(self, num_ranks: Floats) -> Floats:
        """Of one response on the fullest rank: what its hidden state takes beyond the latency floor."""
        sizes, pairs_s = zip(*_PAIR_S, strict=True)
        # The published floor belongs to the published figures, whatever `hop_s` is set to.
        beyond_s = np.interp(np.log2(num_ranks), np.log2(sizes), np.array(pairs_s) - 60e-6)
        beyond_s = np.where(
            num_ranks < sizes[0], beyond_s * (1 - 1 / num_ranks) / (1 - 1 / sizes[0]), beyond_s
        )
        scale = self.model.num_layers * self.model.hidden_size / _PAIR_HIDDEN_SIZE / _PAIR_TOKENS
        return np.asarray(beyond_s * scale, dtype=np.float64)


def balanced_load(num_ranks: int, num_running: int, context_tokens_per_response: float) -> GroupLoad:
    """Responses of one length spread as evenly as they go."""
    most = math.ceil(num_running / num_ranks)
    return GroupLoad(
        num_ranks=num_ranks,
        num_running=num_running,
        max_running=most,
        max_context_tokens=round(most * context_tokens_per_response),
    )
