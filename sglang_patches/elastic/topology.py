"""What elastic membership supports, checked again where SGLang has resolved every flag."""

from typing import Any, NoReturn


def num_experts_of(text_config: Any) -> int:
    """Routed experts of a model's Hugging Face configuration."""
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if getattr(text_config, name, None):
            return int(getattr(text_config, name))
    _refuse("the model has no routed experts", "serve it with --flexfloor-membership static")


def check_topology(scheduler: Any, num_experts: int, floor: int) -> None:
    """Refuse what a rank could not leave without changing the others' results."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    size = parallel.tp_size
    wanted = {"tp_size": size, "moe_ep_size": size, "attn_dp_size": size, "attn_tp_size": 1}
    wanted |= {"attn_cp_size": 1, "pp_size": 1, "moe_tp_size": 1}
    for name, value in wanted.items():
        if getattr(parallel, name) != value:
            _refuse(f"{name}={getattr(parallel, name)}, must be {value}", "one rank must be one worker")
    if num_experts % size:
        _refuse(f"{num_experts} experts over {size} ranks", "take an EP size that divides the experts")
    if not 1 <= floor <= size:
        _refuse(f"--flexfloor-floor={floor}", f"take 1 to {size}")
    model = scheduler.tp_worker.model_runner.model
    for module in model.modules():
        if getattr(module, "num_fused_shared_experts", 0):
            _refuse("the model fuses shared experts", "add --disable-shared-experts-fusion")


def _refuse(problem: str, fix: str) -> NoReturn:
    raise SystemExit(f"flexfloor refuses to start: elastic membership: {problem}. Fix: {fix}.")
