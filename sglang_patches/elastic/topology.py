"""What elastic membership supports, checked again where SGLang has resolved every flag."""

from typing import Any, NoReturn


def num_experts_of(text_config: Any) -> int:
    """Routed experts of a model's Hugging Face configuration."""
    num_experts = known_num_experts(text_config)
    if not num_experts:
        _refuse("the model has no routed experts", "serve it with --flexfloor-membership static")
    return num_experts


def known_num_experts(text_config: Any) -> int:
    """The same, 0 for a model without."""
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if getattr(text_config, name, None):
            return int(getattr(text_config, name))
    return 0


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


def check_experts(scheduler: Any, num_reserved_slots: int) -> None:
    """Refuse expert layers that a map of experts to slots does not reach, or that have no reserved slots."""
    for module in scheduler.tp_worker.model_runner.model.modules():
        if not hasattr(module, "w13_weight"):
            continue
        if getattr(module.dispatcher, "skip_local_expert_mapping", False):
            _refuse("the MoE kernels take contiguous expert ids", "add --moe-runner-backend triton")
        num_slots = module.w13_weight.shape[0]
        if num_reserved_slots and num_slots != num_reserved_slots:
            problem = f"expert layers of {num_slots} slots, not {num_reserved_slots}: are they quantised?"
            _refuse(problem, "serve a checkpoint that is not, or add --flexfloor-expert-slots exact")


def check_graphs(scheduler: Any, expert_slots: str) -> None:
    """Refuse CUDA graphs over experts that move."""
    runner = scheduler.tp_worker.model_runner
    if runner.device == "cpu" or expert_slots == "reserved":
        return
    for name in ("decode_cuda_graph_runner", "prefill_cuda_graph_runner"):
        if getattr(runner, name, None) not in (None, runner.eager_runner):
            problem = "CUDA graphs hold the addresses of the experts, and exact slots move them"
            _refuse(problem, "take --flexfloor-expert-slots reserved, or switch the graphs off")


def no_recovery(device: str) -> str:
    """Why a lost rank ends the server; else empty."""
    return "" if device == "cpu" else f"recovery has not been run on device {device}"


def unsafe_repeat(model_config: Any) -> str:
    """Why a broken forward pass cannot simply be made once more; else empty."""
    if getattr(model_config, "is_hybrid_swa", False):
        return "the model's sliding-window cache has not been tried with a repeated pass"
    if getattr(model_config, "linear_attn_registry_result", None) or _is_recurrent(
        model_config.hf_text_config
    ):
        return "the model's recurrent state would take a repeated pass twice"
    return ""


def _is_recurrent(text_config: Any) -> bool:
    names = (
        "linear_attn_config",
        "mamba_d_state",
        "mamba_ssm_dtype",
        "linear_num_key_heads",
        "ssm_state_size",
    )
    return any(getattr(text_config, name, None) for name in names)


def _refuse(problem: str, fix: str) -> NoReturn:
    raise SystemExit(f"flexfloor refuses to start: elastic membership: {problem}. Fix: {fix}.")
