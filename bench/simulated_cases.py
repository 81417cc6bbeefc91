"""The cases of `simulated.py`: a regime on a machine, what is known of it, and what is wrong about that."""

from dataclasses import dataclass, replace

from flexfloor.experts.memory import KvNeed, MemoryBudget, plan_size
from flexfloor.model_memory import ModelShape
from flexfloor.scheduling.clocks import H100, H200, GpuClock, GpuSpec
from flexfloor.scheduling.cost import Clock
from flexfloor.simulate.forecast import Knowledge
from flexfloor.simulate.scenario import Machine
from flexfloor.simulate.traces import REGIMES

QWEN3_30B_A3B = ModelShape(
    num_layers=48,
    num_experts=128,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_attention_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    dtype_bytes=2,
    kv_dtype_bytes=2,
)
GIB = 1024**3
MEMORY_BYTES = {"h200": 139 * GIB, "h100": 79 * GIB}
OTHER_BYTES = 8 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A regime on a machine, with what is known of it."""

    name: str
    regime: str
    spec: GpuSpec = H200
    memory: str = "h200"
    other_bytes: int = OTHER_BYTES
    truth: GpuSpec | None = None
    """What iterations really take; None: as the policies believe."""
    knowledge: Knowledge = Knowledge.history
    noise_sd: float = 0.0
    prompt_share: float = 0.55
    running_limit: int = 256
    set_sizes: tuple[int, ...] = ()
    """Member sets that are prepared, each the first ranks; none: any set."""


def sensitivities(regime: str) -> list[Setting]:
    """Wrong predictions, dear and free switches, a cost model that is wrong by a factor of two."""
    found = [
        Setting(name=f"{regime} noise {noise:g}", regime=regime, noise_sd=noise) for noise in (0.25, 0.5, 1.0)
    ]
    found.append(Setting(name=f"{regime} cold", regime=regime, knowledge=Knowledge.cold))
    found.append(Setting(name=f"{regime} reversed", regime=regime, knowledge=Knowledge.reversed))
    for stall_s in (0.0, 1.0, 3.0):
        spec = replace(H200, switch_fixed_s=stall_s, name=f"h200, switch {stall_s:g} s")
        found.append(Setting(name=f"{regime} switch {stall_s:g} s", regime=regime, spec=spec))
    found += [
        Setting(name=f"{regime} true {name}", regime=regime, truth=truth) for name, truth in wrong_clocks()
    ]
    found.append(Setting(name=f"{regime} prompt share 0.8", regime=regime, prompt_share=0.8))
    num_ranks = REGIMES[regime].num_ranks
    for parts in ((4, 2), (6, 4, 3, 2)):
        set_sizes = tuple(num_ranks * part // 8 for part in parts)
        name = f"{regime} member sets of {', '.join(str(size) for size in set_sizes)} only"
        found.append(Setting(name=name, regime=regime, set_sizes=set_sizes))
    return found


def wrong_clocks() -> list[tuple[str, GpuSpec]]:
    """What iterations really take, where the policies begin with plain H200 constants."""
    factors: list[dict[str, float]] = [
        {name: factor} for name in ("hop_s", "fixed_s", "kv_efficiency") for factor in (0.5, 2.0)
    ]
    factors += [{"fixed_s": factor, "hop_s": factor} for factor in (0.5, 2.0)]
    # Latency against launches: what makes a smaller group look better, and what makes it look worse.
    factors += [{"hop_s": 3.0, "fixed_s": 0.4}, {"hop_s": 0.33, "fixed_s": 0.4}, {"weight_efficiency": 0.5}]
    specs = [H200.scaled(**each) for each in factors]
    return [(spec.name.partition(" ")[2].strip("()"), spec) for spec in specs]


MEMORY_CASES = (
    Setting(name="C on H100", regime="C", spec=H100, memory="h100"),
    Setting(name="C on H100, 25 GB taken", regime="C", spec=H100, memory="h100", other_bytes=25 * 10**9),
    Setting(name="D on H100, 32 running", regime="D", spec=H100, memory="h100", running_limit=32),
)

QUICK_CASES = (
    Setting(name="A noise 1", regime="A", noise_sd=1.0),
    Setting(name="A true hop_s x 0.5", regime="A", truth=H200.scaled(hop_s=0.5)),
)


def machine_of(setting: Setting) -> Machine:
    num_ranks = REGIMES[setting.regime].num_ranks
    believed: Clock = GpuClock(spec=setting.spec)
    budget = MemoryBudget(
        memory_bytes=MEMORY_BYTES[setting.memory], usable_share=0.9, other_bytes=setting.other_bytes
    )

    def kv_tokens(num_members: int) -> int:
        return plan_size(QWEN3_30B_A3B, num_members, budget, KvNeed(longest_tokens=0)).kv_tokens

    return Machine(
        num_ranks=num_ranks,
        floor=max(2, num_ranks // 4),
        clock=believed if setting.truth is None else GpuClock(spec=setting.truth),
        policy_clock=None if setting.truth is None else believed,
        running_limit_per_rank=setting.running_limit,
        member_sets=tuple(tuple(range(size)) for size in setting.set_sizes) or None,
        kv_tokens=kv_tokens,
        # Live it is 16; about 128 decisions a step tell what a thousand do, and drained ranks wait for none.
        decision_interval_iterations=REGIMES[setting.regime].cap_tokens // 128,
    )
