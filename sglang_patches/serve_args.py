"""Splits a `flexfloor-serve` command line into our flags and SGLang's, and refuses what cannot work."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from sglang_patches import member_sets, nodes
from sglang_patches.elastic.delays import DelayConfig
from sglang_patches.elastic_flags import unsupported
from sglang_patches.member_sets import MemberSets
from sglang_patches.plugin_config import (
    COLLECTIVES,
    EXPERT_SLOTS,
    MEMBERSHIPS,
    PARK_FREES,
    RECOVERIES,
    RELEASES,
    RETRIES,
    PluginConfig,
)

_OWN_PREFIX = "--flexfloor-"
CLOCKS = ("neutral", "h20", "h100", "h200")
"""Of flexfloor.scheduling.clocks, which is not imported for a name."""
_TP_FLAGS = ("--tp-size", "--tensor-parallel-size", "--tp")
_PP_FLAGS = ("--pp-size", "--pipeline-parallel-size", "--pp")
_DP_FLAGS = ("--dp-size", "--data-parallel-size", "--dp")
_EP_FLAGS = ("--ep-size", "--expert-parallel-size", "--ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """One checked command line."""

    sglang_flags: list[str]
    device: str
    num_ranks: int
    """Scheduler processes of the whole server."""
    num_nodes: int = 1
    node_rank: int = 0
    collectives: str = "gloo"
    left_out: tuple[str, ...] = ()
    iteration_log: str = ""
    membership: str = "static"
    floor: int = 1
    folder: str = ""
    release: str = "manual"
    release_quiet_s: float = 0.1
    clock: str = "neutral"
    bind: str = nodes.UNIX
    expert_slots: str = "exact"
    park_frees: tuple[str, ...] = ("experts", "kv")
    member_sets: MemberSets = ()
    prepare_timeout_s: float = 120.0
    recovery: str = "auto"
    retry: str = "auto"
    heartbeat_timeout_s: float = 60.0
    fault_folder: str = ""
    delays: DelayConfig = field(default_factory=DelayConfig)

    @property
    def num_local_ranks(self) -> int:
        """Scheduler processes on this host."""
        return max(1, self.num_ranks // self.num_nodes)

    def plugin_config(self) -> PluginConfig:
        """What the plugin needs to know of it."""
        names = {row.name for row in fields(PluginConfig)}
        return PluginConfig(**{name: getattr(self, name) for name in names})


def parse(argv: Sequence[str]) -> ServeArgs:
    """Split and check. Ends the process with one message naming flag, value and fix when a check fails."""
    own, sglang_flags = _split(argv)
    device = flag_value(sglang_flags, "--device") or "auto"
    args = ServeArgs(
        sglang_flags=sglang_flags,
        device=device,
        num_ranks=_num_ranks(sglang_flags),
        num_nodes=_int_flag(sglang_flags, ("--nnodes",)),
        node_rank=_node_rank(sglang_flags),
        collectives=own.pop("--flexfloor-collectives", "gloo"),
        left_out=_listed(own.pop("--flexfloor-leave-out", "")),
        iteration_log=own.pop("--flexfloor-iteration-log", ""),
        **_membership_args(own, device),
    )
    for name, value in own.items():
        _refuse(name, value, "there is no such flag", "see flexfloor-serve --help")
    _check(args)
    return args


def _membership_args(own: dict[str, str], device: str) -> dict[str, Any]:
    floor = own.pop("--flexfloor-floor", "1")
    if not floor.isdecimal():
        _refuse("--flexfloor-floor", floor, "not a number of ranks", "give an integer of 1 or more")
    return {
        "membership": own.pop("--flexfloor-membership", "static"),
        "floor": int(floor),
        "folder": own.pop("--flexfloor-folder", ""),
        "bind": own.pop("--flexfloor-bind", nodes.UNIX),
        "expert_slots": own.pop("--flexfloor-expert-slots", "exact" if device == "cpu" else "reserved"),
        "park_frees": _listed(own.pop("--flexfloor-park-frees", "experts,kv")),
        "member_sets": _member_sets(own.pop("--flexfloor-member-sets", "")),
        "prepare_timeout_s": _seconds(own, "--flexfloor-prepare-timeout", "120"),
        "recovery": own.pop("--flexfloor-recovery", "auto"),
        "retry": own.pop("--flexfloor-retry", "auto"),
        "heartbeat_timeout_s": _seconds(own, "--flexfloor-heartbeat-timeout-s", "60"),
        "release": own.pop("--flexfloor-release", "manual"),
        "release_quiet_s": _seconds(own, "--flexfloor-release-quiet", "0.1"),
        "clock": own.pop("--flexfloor-clock", "neutral"),
        "fault_folder": own.pop("--flexfloor-fault-folder", ""),
        "delays": _delays(own.pop("--flexfloor-delays", "")),
    }


def _seconds(own: dict[str, str], flag: str, default: str) -> float:
    text = own.pop(flag, default)
    if not text.replace(".", "", 1).isdecimal() or float(text) <= 0:
        _refuse(flag, text, "not a time in seconds", "give a positive number")
    return float(text)


def _member_sets(text: str) -> MemberSets:
    try:
        return member_sets.parse(text)
    except ValueError as error:
        _refuse("--flexfloor-member-sets", text, str(error), "for example 0,1,2,3;0,1")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _delays(text: str) -> DelayConfig:
    """`probability,min_s,max_s,seed`."""
    if not text:
        return DelayConfig()
    try:
        probability, min_s, max_s, seed = text.split(",")
        return DelayConfig(
            probability=float(probability), min_s=float(min_s), max_s=float(max_s), seed=int(seed)
        )
    except ValueError:
        _refuse("--flexfloor-delays", text, "not probability,min_s,max_s,seed", "for example 0.01,0.2,2,0")


def flag_value(flags: Sequence[str], *names: str) -> str | None:
    """Value of the last of these flags, written `--name value` or `--name=value`; None when not given."""
    value = None
    for index, flag in enumerate(flags):
        name, is_joined, joined = flag.partition("=")
        if name in names:
            value = joined if is_joined else "".join(flags[index + 1 : index + 2])
    return value


def has_flag(flags: Sequence[str], *names: str) -> bool:
    """Whether one of these flags is given, with or without a value."""
    return any(flag.partition("=")[0] in names for flag in flags)


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    own: dict[str, str] = {}
    rest: list[str] = []
    flags = iter(argv)
    for flag in flags:
        if not flag.startswith(_OWN_PREFIX):
            rest.append(flag)
            continue
        name, is_joined, value = flag.partition("=")
        own[name] = value if is_joined else next(flags, "")
    return own, rest


def _num_ranks(flags: Sequence[str]) -> int:
    tp_size, pp_size = _int_flag(flags, _TP_FLAGS), _int_flag(flags, _PP_FLAGS)
    # Attention DP splits the TP ranks; without it each data-parallel replica has TP ranks of its own.
    num_replicas = 1 if has_flag(flags, "--enable-dp-attention") else _int_flag(flags, _DP_FLAGS)
    return tp_size * pp_size * num_replicas


def _int_flag(flags: Sequence[str], names: tuple[str, ...]) -> int:
    value = flag_value(flags, *names) or "1"
    if not value.isdecimal() or int(value) < 1:
        _refuse(names[0], value, "not a positive integer", "give the number of ranks")
    return int(value)


def _node_rank(flags: Sequence[str]) -> int:
    value = flag_value(flags, "--node-rank") or "0"
    if not value.isdecimal():
        _refuse("--node-rank", value, "not a node's number", "give 0 to --nnodes - 1")
    return int(value)


def _check(args: ServeArgs) -> None:
    if args.collectives not in COLLECTIVES:
        _refuse("--flexfloor-collectives", args.collectives, "unknown", f"one of {', '.join(COLLECTIVES)}")
    if args.collectives == "shm":
        _check_shm(args)
    if has_flag(args.sglang_flags, "--enable-dp-attention") and args.num_ranks > 1:
        _check_dp_attention(args.sglang_flags)
    if args.membership not in MEMBERSHIPS:
        _refuse("--flexfloor-membership", args.membership, "unknown", f"one of {', '.join(MEMBERSHIPS)}")
    _check_release(args)
    if args.membership == "elastic":
        _check_elastic(args)


def _check_release(args: ServeArgs) -> None:
    if args.release not in RELEASES:
        _refuse("--flexfloor-release", args.release, "unknown", f"one of {', '.join(RELEASES)}")
    if args.release != "manual" and args.membership == "static":
        problem = "nobody can leave a static group"
        _refuse("--flexfloor-release", args.release, problem, "add --flexfloor-membership elastic")
    if args.recovery not in RECOVERIES:
        _refuse("--flexfloor-recovery", args.recovery, "unknown", f"one of {', '.join(RECOVERIES)}")
    if args.retry not in RETRIES:
        _refuse("--flexfloor-retry", args.retry, "unknown", f"one of {', '.join(RETRIES)}")
    if args.recovery == "on" and args.membership == "static":
        problem = "a static group cannot go on without a rank"
        _refuse("--flexfloor-recovery", "on", problem, "add --flexfloor-membership elastic")
    if args.clock not in CLOCKS:
        _refuse("--flexfloor-clock", args.clock, "unknown", f"one of {', '.join(CLOCKS)}")


def _check_elastic(args: ServeArgs) -> None:
    for found in unsupported(args.sglang_flags):
        _refuse(
            found.flag,
            found.value,
            f"not supported with elastic membership: {found.reason}",
            "leave it out, or serve with --flexfloor-membership static",
        )
    if args.num_ranks == 1 or not has_flag(args.sglang_flags, "--enable-dp-attention"):
        problem = "needs several ranks that are attention-DP and EP ranks at once"
        fix = "give --tp-size N --dp-size N --ep-size N --enable-dp-attention"
        _refuse("--flexfloor-membership", "elastic", problem, fix)
    sizes = {_int_flag(args.sglang_flags, names) for names in (_TP_FLAGS, _DP_FLAGS, _EP_FLAGS)}
    if len(sizes) > 1:
        problem = "one rank is one worker, so --tp-size, --dp-size and --ep-size must be equal"
        _refuse("--flexfloor-membership", "elastic", problem, "give the same number for all three")
    if not 1 <= args.floor <= args.num_ranks:
        problem = f"there are {args.num_ranks} ranks"
        _refuse("--flexfloor-floor", str(args.floor), problem, f"take 1 to {args.num_ranks}")
    if args.expert_slots not in EXPERT_SLOTS:
        _refuse("--flexfloor-expert-slots", args.expert_slots, "unknown", f"one of {', '.join(EXPERT_SLOTS)}")
    if set(args.park_frees) - set(PARK_FREES):
        value = ",".join(args.park_frees)
        _refuse("--flexfloor-park-frees", value, "unknown", f"any of {', '.join(PARK_FREES)}")
    _check_nodes(args)
    _check_member_sets(args)
    if args.device != "cpu" and args.expert_slots == "exact" and captures_graphs(args.sglang_flags):
        problem = "a CUDA graph holds the addresses of the experts, and exact slots move them at every change"
        off = "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
        _refuse("--flexfloor-expert-slots", "exact", problem, f"take reserved, or add {off}")


def _check_nodes(args: ServeArgs) -> None:
    dist_init_addr = flag_value(args.sglang_flags, "--dist-init-addr")
    try:
        is_unix = nodes.parse_bind(args.bind) is None
        clash = nodes.clash_of(args.bind, dist_init_addr)
    except ValueError as error:
        _refuse("--flexfloor-bind", args.bind, str(error), "give unix, or tcp://NODE0:PORT")
    if clash:
        _refuse("--flexfloor-bind", args.bind, f"{clash}, and the store takes PORT + 1", "take other ports")
    if args.num_nodes == 1:
        return
    if is_unix:
        problem = f"the ranks of --nnodes {args.num_nodes} must reach the manager on node 0"
        _refuse("--flexfloor-bind", args.bind, problem, "add --flexfloor-bind tcp://NODE0:PORT on every node")
    if not args.folder:
        problem = "node 0 leaves the keys there for the other nodes"
        _refuse("--flexfloor-folder", "not given", problem, "name the same folder, which all nodes see")
    if not dist_init_addr:
        problem = f"--nnodes {args.num_nodes} must meet somewhere"
        _refuse("--dist-init-addr", "not given", problem, "give NODE0:PORT, the same on every node")
    if args.node_rank >= args.num_nodes:
        problem = f"there are {args.num_nodes} nodes"
        _refuse("--node-rank", str(args.node_rank), problem, f"take 0 to {args.num_nodes - 1}")
    if args.num_ranks % args.num_nodes:
        problem = f"{args.num_ranks} ranks cannot be shared out evenly"
        _refuse("--nnodes", str(args.num_nodes), problem, "take a number that divides --tp-size")


def _check_member_sets(args: ServeArgs) -> None:
    problem = member_sets.problem_of(args.member_sets, num_ranks=args.num_ranks, floor=args.floor)
    if problem is not None:
        value = ";".join(",".join(map(str, members)) for members in args.member_sets)
        fix = f"name sets of {args.floor} to {args.num_ranks} different ranks of 0 to {args.num_ranks - 1}"
        _refuse("--flexfloor-member-sets", value, problem, fix)


def captures_graphs(flags: Sequence[str]) -> bool:
    """Whether SGLang captures CUDA graphs of decode or prefill with these flags, on a device that has any."""
    return any(_captures(flags, phase) for phase in ("decode", "prefill"))


def _captures(flags: Sequence[str], phase: str) -> bool:
    # As SGLang resolves them: a named backend is stronger than the switches.
    backend = flag_value(flags, f"--cuda-graph-backend-{phase}")
    if backend is not None:
        return backend != "disabled"
    return not has_flag(flags, "--disable-cuda-graph", f"--disable-{phase}-cuda-graph")


def _check_shm(args: ServeArgs) -> None:
    if args.device != "cpu":
        problem = f"works on the CPU, not on device {args.device}"
        _refuse("--flexfloor-collectives", "shm", problem, "add --device cpu, or take gloo")
    if flag_value(args.sglang_flags, "--nnodes") not in (None, "1"):
        _refuse(
            "--flexfloor-collectives", "shm", "works within one host only", "leave out --nnodes, or take gloo"
        )


def _check_dp_attention(flags: Sequence[str]) -> None:
    if has_flag(flags, "--enable-dp-attention-local-control-broadcast"):
        _refuse(
            "--enable-dp-attention-local-control-broadcast",
            "on",
            "ranks would take a weight update in different iterations, and its barriers would hang",
            "leave the flag out",
        )
    if not has_flag(flags, "--enable-dp-lm-head"):
        _refuse(
            "--enable-dp-attention",
            "on",
            "the LM head would be split over all ranks, so none of them could leave the group",
            "add --enable-dp-lm-head",
        )
    if _int_flag(flags, _DP_FLAGS) == _int_flag(flags, _TP_FLAGS) and flag_value(
        flags, "--moe-dense-tp-size"
    ) not in ("1",):
        _refuse(
            "--moe-dense-tp-size",
            flag_value(flags, "--moe-dense-tp-size") or "not given",
            "dense layers would be split over all ranks",
            "add --moe-dense-tp-size 1",
        )


def _refuse(flag: str, value: str, problem: str, fix: str) -> NoReturn:
    raise SystemExit(f"flexfloor-serve: {flag}={value}: {problem}. Fix: {fix}.")
