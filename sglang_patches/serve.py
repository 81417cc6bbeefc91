"""`flexfloor-serve`: SGLang's server with FlexFloor's hooks. All of SGLang's flags pass through unchanged.

Own flags:
  --flexfloor-collectives gloo|shm   what carries the collectives of the EP group (default gloo).
                                     shm: shared memory between the ranks of one host, CPU only, for ranks
                                     that share cores; bench/decode.py compares the two.
  --flexfloor-leave-out TARGET,...   hooks of the catalog not to install, to measure what they are worth.
  --flexfloor-iteration-log FOLDER   each rank logs its iterations there: membership epoch, requests, tokens
                                     and time, 20 bytes each. Logs of an earlier server are replaced.
  --flexfloor-membership static|elastic
                                     elastic: ranks may leave the EP group during a rollout and return.
                                     Needs --tp-size = --dp-size = --ep-size and --enable-dp-attention.
  --flexfloor-floor N                fewest ranks that may serve (default 1).
  --flexfloor-release manual|drained|policy
                                     who says when ranks leave. manual (default): a driver, over the routes
                                     under /flexfloor/ or the manager's socket. drained: the server itself, as
                                     soon as a rank has nothing to do. policy: the server, where the cost
                                     model says that it pays.
  --flexfloor-release-quiet S        drained and policy wait until no request has come for so long (default
                                     0.1 s).
  --flexfloor-clock NAME             cost model of policy: neutral (default), h20, h100, h200.
  --flexfloor-folder FOLDER          folder, for this user only, of the membership manager's socket and of the
                                     token that the changing routes ask for (default: one per port below the
                                     user's runtime folder). Needed with --nnodes: the same folder on all
                                     nodes, on a shared file system.
  --flexfloor-bind unix|tcp://NODE0:PORT
                                     where the manager listens (default: a unix socket in the folder). tcp:
                                     encrypted, keys in the folder; PORT + 1 is taken as well. With --nnodes
                                     every node gets the same address.
  --flexfloor-expert-slots exact|reserved
                                     exact: room for experts taken over is made at the switch (CPU default).
                                     reserved: ceil(experts / floor) slots from the start (GPU default).
  --flexfloor-park-frees WHAT,...    what a parked rank gives back: experts, kv, dense (default experts,kv).
  --flexfloor-member-sets A,B;A,...  sets of ranks, besides the full one, whose communicators are made at the
                                     start and, on a GPU, whose CUDA graphs are captured. Any other set
                                     works too: its communicator is made at the change, and it decodes
                                     without graphs.
  --flexfloor-prepare-timeout S      a change that is not prepared by then is cancelled (default 120).
  --flexfloor-recovery auto|on|off   whether the other ranks go on when one is lost. auto (default): on CPUs;
                                     on: refuse to start elsewhere; off: a lost rank ends the server. The
                                     experts are mirrored in host memory for it.
  --flexfloor-retry auto|prefill     what follows a forward pass that broke with a lost rank. auto (default):
                                     it is made again where the model allows it, else as with prefill: the
                                     requests of each rank are prefilled again, with the tokens they have.
  --flexfloor-heartbeat-timeout-s S  a rank that is silent for so long is ended, and is lost (default 60).
  --flexfloor-delays P,MIN,MAX,SEED  random delays in the ranks, for tests.
  --flexfloor-fault-folder FOLDER    a file kill-RANK-POINT or stop-RANK-POINT there ends or stops a rank at a
                                     point, for tests.

With `--device cpu` the flags and variables that SGLang needs on a CPU without AMX are filled in where they
are not given: plain torch attention and sampling, no CUDA graphs, one group of cores per rank.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from flexfloor import left_overs
from sglang_patches import CONFIG_ENV, nodes, plugin_config
from sglang_patches.cpu import profile
from sglang_patches.serve_args import ServeArgs, flag_value, parse

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAST_SERVER_S = 10.0
"""The processes of a server that was killed are gone by then."""
_ENVIRONMENT_DEFAULTS = {
    # A probe of /health would decode a token: it would count as an iteration. /health_generate still does.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Check the flags, then become SGLang's server (exec), so that the caller owns the server's pid.

    Ends the process with one message when a flag of ours, or a combination, cannot work.
    """
    raw = list(sys.argv[1:] if argv is None else argv)
    if raw in (["--help"], ["-h"]):
        print(__doc__)
        print("SGLang's own flags: python -m sglang.launch_server --help")
        return
    args = parse(raw)
    check_plugin_is_found(os.environ)
    sglang_flags, environment = args.sglang_flags, {**_ENVIRONMENT_DEFAULTS, **os.environ}
    if args.device == "cpu":
        sglang_flags = profile.fill_flags(args)
        environment.update(profile.environment(args, environment))
    if args.membership == "elastic" or args.node_rank == 0:
        if args.bind == nodes.UNIX:
            hold_folder(args)
        # A static server has nothing but a token in it, which its first node's routes ask for.
        args = replace(args, folder=prepare_folder(args))
    if args.iteration_log:
        args = replace(args, iteration_log=prepare_log_folder(args.iteration_log, args.node_rank))
    warn_of_open_server(args.sglang_flags)
    environment[CONFIG_ENV] = publish_config(args)
    command = [sys.executable, "-m", "sglang.launch_server", *sglang_flags]
    os.execve(sys.executable, command, environment)


def prepare_folder(args: ServeArgs) -> str:
    """Make the folder of the manager's socket, with a new token; returns its path. Node 0 does; others wait.

    Ends the process where the folder cannot be kept from other users, or node 0 has not come.
    """
    from flexfloor.membership.endpoint import Endpoint

    folder = folder_of(args)
    try:
        if args.bind == nodes.UNIX:
            Endpoint.local(folder)
            (folder / "groups").unlink(missing_ok=True)
        else:
            meeting = flag_value(args.sglang_flags, "--dist-init-addr")
            launch = nodes.launch_name(meeting, args.num_nodes, os.environ)
            nodes.prepare_endpoint(str(folder), args.bind, launch=launch, node_rank=args.node_rank)
    except (OSError, ValueError) as error:
        raise SystemExit(f"flexfloor-serve: --flexfloor-folder={folder}: {error}") from error
    return str(folder)


def folder_of(args: ServeArgs) -> Path:
    """The one that is named, or else one per port."""
    port = flag_value(args.sglang_flags, "--port") or "30000"
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/flexfloor-{os.getuid()}"
    return Path(args.folder or f"{runtime}/flexfloor-{port}").absolute()


def hold_folder(args: ServeArgs) -> None:
    """Mark the folder as this server's until it ends, and remove what servers that were killed have left.

    Ends the process where another server has the folder.
    """
    folder = folder_of(args)
    if not args.folder:
        _own(folder.parent)
        left_overs.remove_left_folders(folder.parent)
    left_overs.remove_left_shared_memory()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Open over exec, like the configuration: the lock lasts as long as the server.
        left_overs.hold(folder, through_exec=True, timeout_s=LAST_SERVER_S)
    except BlockingIOError as error:
        reason = "another server uses this folder. Fix: end it, or name another folder or port"
        raise SystemExit(f"flexfloor-serve: --flexfloor-folder={folder}: {reason}") from error
    except OSError as error:
        raise SystemExit(f"flexfloor-serve: --flexfloor-folder={folder}: {error}") from error


def _own(folder: Path) -> None:
    """Its name is no secret: in /tmp another user could have made it first, and would rule what is in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        reason = f"{folder} belongs to somebody else. Fix: set --flexfloor-folder"
        raise SystemExit(f"flexfloor-serve: {reason}")
    if folder.name == f"flexfloor-{os.getuid()}":
        # An earlier version left it readable; anything else is the user's to set.
        folder.chmod(0o700)


def warn_of_open_server(sglang_flags: Sequence[str]) -> None:
    """SGLang's own routes change weights and abort requests for whoever reaches a port without a key."""
    host = flag_value(sglang_flags, "--host") or "127.0.0.1"
    is_local = host in LOOPBACK
    if not is_local and flag_value(sglang_flags, "--admin-api-key", "--api-key") is None:
        print(
            f"flexfloor-serve: warning: --host={host} without --admin-api-key: whoever reaches the port may "
            "change the weights over SGLang's own routes. Fix: give a key, or use a private network",
            file=sys.stderr,
        )


def prepare_log_folder(folder: str, node_rank: int = 0) -> str:
    """Make the folder of the iteration logs, without those of an earlier server; returns its path.

    Only node 0 removes those: another node may be late, and the folder is shared.
    """
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        for log in path.glob("iterations-rank*.bin") if node_rank == 0 else ():
            log.unlink()
    except OSError as error:
        raise SystemExit(f"flexfloor-serve: --flexfloor-iteration-log={folder}: {error}") from error
    return str(path)


def check_plugin_is_found(environment: Mapping[str, str]) -> None:
    """Refuse what would make SGLang serve without our hooks and say nothing of it."""
    if not entry_points(group="sglang.srt.plugins", name="flexfloor"):
        raise SystemExit("flexfloor-serve: the package flexfloor is not installed. Fix: pip install it.")
    chosen = environment.get("SGLANG_PLUGINS", "")
    if chosen and "flexfloor" not in [name.strip() for name in chosen.split(",")]:
        raise SystemExit(f"flexfloor-serve: SGLANG_PLUGINS={chosen}: leaves flexfloor out. Fix: add it.")


def publish_config(args: ServeArgs) -> str:
    """Write the plugin's configuration to anonymous memory and return its path.

    The descriptor stays open over exec and the pid stays the same: every process of the server can read the
    path while the server lives, only this user can, and nothing is left behind however the server ends.
    """
    text = plugin_config.dump(args.plugin_config())
    descriptor = os.memfd_create("flexfloor_plugin_config", 0)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode("ascii"))
    return f"/proc/{os.getpid()}/fd/{descriptor}"


if __name__ == "__main__":
    main()
