"""Every place where FlexFloor changes SGLang, one row each: data only, no code runs here.

Rule 1: a row names its target, the hook, the reason, until when it is needed and what it was checked with.
Rule 2: a version of SGLang without a digest in `checked` does not start; see `verify.py`.
Rule 3: never replace a class; prefer before and after to around.

To move to a new SGLang: run scripts/check_sglang.py on its wheel, read the diff of each changed target, run
the tests on it, then add the new digest.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One hook on one function of SGLang."""

    target: str
    """Dotted path of the function or method."""
    hook: str
    """`module:function` in `sglang_patches/hooks/`; the module is named like the patched one."""
    hook_type: Literal["before", "after", "around", "replace"]
    process: str
    """The process in which the hook does something; it is installed in all of them."""
    why: str
    upstream: str
    """Issue or pull request of SGLang, or why there is none."""
    remove_when: str
    checked: dict[str, str]
    """SGLang version -> digest of the target's source text."""
    device: Literal["cpu", "any"] = "any"
    """`cpu`: active only when the server runs with `--device cpu`."""
    collectives: Literal["gloo", "shm", "any"] = "any"
    """Active only with this value of `--flexfloor-collectives`."""


PATCHES: tuple[Patch, ...] = (
    Patch(
        target="sglang.srt.managers.scheduler.Scheduler.run_batch",
        hook="scheduler:count_iteration",
        hook_type="before",
        process="scheduler",
        why="Occupied worker time is counted in iterations of the EP group, which SGLang does not report.",
        upstream="none: project-specific",
        remove_when="SGLang reports forward passes and idle passes per attention-DP rank.",
        checked={"0.5.23": "22ba519bbaf7"},
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.internal_state"
        ".SchedulerInternalStateController.get_internal_state",
        hook="internal_state:report_iterations",
        hook_type="after",
        process="scheduler",
        why="The driver reads each rank's counters through /server_info; no route of our own is needed.",
        upstream="none: project-specific",
        remove_when="SGLang reports forward passes and idle passes per attention-DP rank.",
        checked={"0.5.23": "543d7930263c"},
    ),
    Patch(
        target="sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        hook="fused_moe_native:moe_forward_native",
        hook_type="around",
        process="scheduler",
        why="SGLang's fallback fails on topk id -1 (another rank's expert), and is slow on small batches.",
        upstream="not reported",
        remove_when="SGLang's CPU fallback supports expert parallelism.",
        checked={"0.5.23": "c18463b6979f"},
        device="cpu",
    ),
    Patch(
        target="sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.__init__",
        hook="torch_native_backend:add_seq_len_fill_value",
        hook_type="after",
        process="scheduler",
        why="Padding a batch for attention DP asks for a fill value that this backend does not define.",
        upstream="not reported",
        remove_when="TorchNativeAttnBackend defines get_cpu_graph_seq_len_fill_value.",
        checked={"0.5.23": "6566be2dffac"},
        device="cpu",
    ),
    Patch(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv",
        hook="parallel_state:reduce_scatterv_over_gloo",
        hook_type="replace",
        process="scheduler",
        why="The combine of attention DP insists on pynccl; SGLang's own all-reduce variant works over gloo.",
        upstream="not reported",
        remove_when="reduce_scatterv falls back to the process group without pynccl.",
        checked={"0.5.23": "50bc2d1ac169"},
        device="cpu",
        collectives="gloo",
    ),
    Patch(
        target="sglang.srt.distributed.device_communicators.pynccl_wrapper.NCCLLibrary.__init__",
        hook="pynccl_wrapper:find_no_library",
        hook_type="before",
        process="scheduler",
        why="A CUDA build of torch brings NCCL along, and the communicator then asks for a CUDA device.",
        upstream="not reported",
        remove_when="SGLang makes no NCCL communicator for device cpu.",
        checked={"0.5.23": "95fead982195"},
        device="cpu",
    ),
    Patch(
        target="sglang.srt.arg_groups.attention_hook.handle_deterministic_inference",
        hook="attention_hook:admit_torch_native",
        hook_type="before",
        process="server",
        why="A sampling seed per request needs deterministic inference, which refuses the one CPU backend.",
        upstream="not reported",
        remove_when="torch_native is in DETERMINISTIC_ATTENTION_BACKEND_CHOICES.",
        checked={"0.5.23": "e402831f6c83"},
        device="cpu",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        hook="model_runner:skip_batch_invariant_mode",
        hook_type="replace",
        process="scheduler",
        why="The batch-invariant operators are Triton kernels; there is no Triton on the CPU.",
        upstream="not reported",
        remove_when="SGLang skips the mode on the CPU or has CPU operators.",
        checked={"0.5.23": "788ffb152066"},
        device="cpu",
    ),
    Patch(
        target="sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        hook="murmur_hash:murmur_hash32",
        hook_type="replace",
        process="scheduler",
        why="Seeded sampling hashes with a compiled CPU kernel that exists only in SGLang's own CPU build.",
        upstream="not reported",
        remove_when="murmur_hash32 has a fallback in plain torch.",
        checked={"0.5.23": "4811375a4edc"},
        device="cpu",
    ),
    Patch(
        target="sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        hook="engine:fork_processes",
        hook_type="before",
        process="server",
        why="Each spawned process repeats 13 CPU-seconds of imports; forked ones share those of one process.",
        upstream="none: spawning is right where CUDA is initialised",
        remove_when="SGLang's processes start in a second.",
        checked={"0.5.23": "01e5ec16cf45"},
        device="cpu",
    ),
    Patch(
        target="sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        hook="data_parallel_controller:wait_for_requests",
        hook_type="before",
        process="data-parallel controller",
        why="The loop asks for requests without a pause, which takes half a core from the ranks.",
        upstream="not reported",
        remove_when="The controller waits for its socket.",
        checked={"0.5.23": "1d19bd583569"},
        device="cpu",
    ),
    Patch(
        target="sglang.srt.managers.scheduler.Scheduler.on_idle",
        hook="scheduler:nap_when_idle",
        hook_type="after",
        process="scheduler",
        why="Idle ranks spin and take cores from the trainer. All are idle together, so all nap together.",
        upstream="none: sleep_on_idle lets each rank sleep alone, up to 1 s, and stalls its peers",
        remove_when="Idle attention-DP ranks wait together.",
        checked={"0.5.23": "8ab3f3067c4c"},
        device="cpu",
    ),
    Patch(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce",
        hook="parallel_state:all_reduce_over_shm",
        hook_type="around",
        process="scheduler",
        why="Gloo wakes three threads per hop, which wait for a core when ranks share cores.",
        upstream="none: SGLang's own shared-memory path needs AMX",
        remove_when="SGLang's shared-memory collectives run on any CPU.",
        checked={"0.5.23": "562db6b985dc"},
        device="cpu",
        collectives="shm",
    ),
    Patch(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator._all_gather_into_tensor",
        hook="parallel_state:all_gather_over_shm",
        hook_type="around",
        process="scheduler",
        why="As all_reduce: the dispatch of every MoE layer.",
        upstream="none: SGLang's own shared-memory path needs AMX",
        remove_when="SGLang's shared-memory collectives run on any CPU.",
        checked={"0.5.23": "8f9dee81affc"},
        device="cpu",
        collectives="shm",
    ),
    Patch(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv",
        hook="parallel_state:reduce_scatterv_over_shm",
        hook_type="replace",
        process="scheduler",
        why="As all_reduce: the combine of every MoE layer; a rank sums its own rows only.",
        upstream="none: SGLang's own shared-memory path needs AMX",
        remove_when="SGLang's shared-memory collectives run on any CPU.",
        checked={"0.5.23": "50bc2d1ac169"},
        device="cpu",
        collectives="shm",
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.dp_attn.exchange_sync_rows",
        hook="dp_attn:exchange_sync_rows_over_shm",
        hook_type="around",
        process="scheduler",
        why="As all_reduce: the first collective of every iteration.",
        upstream="none: SGLang's own shared-memory path needs AMX",
        remove_when="SGLang's shared-memory collectives run on any CPU.",
        checked={"0.5.23": "635ae71e175b"},
        device="cpu",
        collectives="shm",
    ),
    Patch(
        target="sglang.srt.utils.common.broadcast_pyobj",
        hook="common:broadcast_pyobj_over_shm",
        hook_type="around",
        process="scheduler",
        why="As all_reduce: the control requests, asked for in every iteration, keep all ranks in lockstep.",
        upstream="none: SGLang's own shared-memory path needs AMX",
        remove_when="SGLang's shared-memory collectives run on any CPU.",
        checked={"0.5.23": "b53729e946f6"},
        device="cpu",
        collectives="shm",
    ),
)
