"""Every place where FlexFloor changes SGLang, one row each: data only, no code runs here.

The rows of any server stand below; those for CPUs, of elastic membership and of recovery in `rows/`.

Rule 1: a row names its target, the hook, the reason, until when it is needed and what it was checked with.
Rule 2: a version of SGLang without a digest in `checked` does not start; see `verify.py`.
Rule 3: never replace a class; prefer before and after to around.

To move to a new SGLang: run scripts/check_sglang.py on its wheel, read the diff of each changed target, run
the tests on it, then add the new digest.
"""

from sglang_patches.patch import Patch
from sglang_patches.rows.cpu import CPU_ROWS
from sglang_patches.rows.elastic import ELASTIC_ROWS
from sglang_patches.rows.recovery import RECOVERY_ROWS

_SERVER_ROWS: tuple[Patch, ...] = (
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
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        hook="schedule_batch:count_retractions",
        hook_type="after",
        process="scheduler",
        why="A schedule whose KV caches were too small is another one; SGLang keeps the last count only.",
        upstream="none: project-specific",
        remove_when="SGLang counts retractions per attention-DP rank from its start.",
        checked={"0.5.23": "acfb2495a1eb"},
        iteration_log="on",
    ),
    Patch(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
        hook="tokenizer_manager:start_server_side",
        hook_type="after",
        process="server",
        why="The manager and its routes belong into the process that routes requests, owns control calls and "
        "ends with the engine.",
        upstream="none: project-specific",
        remove_when="SGLang's EP group can shrink and grow back.",
        checked={"0.5.23": "4a61d8e6bbac"},
    ),
    Patch(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
        hook="tokenizer_manager:take_request",
        hook_type="before",
        process="server",
        why="Who knows which requests run on which rank can let drained ranks go, and count response tokens.",
        upstream="none: project-specific",
        remove_when="SGLang chooses the rank in this process and tells it.",
        checked={"0.5.23": "d9479c445812"},
    ),
    Patch(
        target="sglang.srt.utils.auth.decide_request_auth",
        hook="auth:let_own_routes_check",
        hook_type="around",
        process="server",
        why="With an API key and no admin key none of SGLang's levels lets a per-run token through.",
        upstream="none: project-specific",
        remove_when="A route can bring its own check.",
        checked={"0.5.23": "5ab183cd18ad"},
    ),
)

PATCHES = (*_SERVER_ROWS, *CPU_ROWS, *ELASTIC_ROWS, *RECOVERY_ROWS)
