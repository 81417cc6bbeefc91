"""A real SLURM on this host: munged, slurmctld and several slurmd, all in a folder of their own.

Nothing of it is installed as a service and nothing outside the folder is written: key, sockets, state and
logs lie in it, ports are free ones, and every daemon is a child of this process that ends by its pid.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
_START_DEADLINE_S = 60.0
_POLL_S = 0.2


def missing_programs() -> list[str]:
    """Programs of SLURM that this machine lacks; daemons may lie outside a user's PATH."""
    return [name for name in NEEDED if _program(name) is None]


class SlurmCluster:
    """A running cluster of `node_names`; `run` gives its commands their environment."""

    def __init__(self, folder: Path, num_nodes: int, cpus_per_node: int) -> None:
        self.folder = folder
        self.node_names = [f"n{number}" for number in range(1, num_nodes + 1)]
        self._cpus_per_node = cpus_per_node
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        ours = ("SLURM_", "SBATCH_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Raises AssertionError with the daemons' logs when a node is not idle in time."""
        munge_socket = self._start_munge()
        write_conf(self.folder, self.node_names, self._cpus_per_node, munge_socket)
        self._daemon("slurmctld", "-D", "-i")
        for name in self.node_names:
            self._daemon("slurmd", "-D", "-N", name)
        wait_until(lambda: self.node_states() == dict.fromkeys(self.node_names, "idle"), self.logs)

    def stop(self) -> None:
        """End the daemons, the last one started first, and all that jobs left behind below them."""
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def run(self, *argv: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Standard output of one of SLURM's commands."""
        done = subprocess.run(
            argv,
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def node_states(self) -> dict[str, str]:
        """idle, allocated, mixed, ... by node; empty while the controller does not answer."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).splitlines()
        return dict(line.split() for line in lines)

    def submit(self, script: Path, *arguments: str, options: Sequence[str] = (), cwd: Path) -> "SlurmJob":
        """Queue a batch script; its output goes to `cwd`."""
        output = cwd / "slurm-%j.out"
        argv = ["sbatch", "--parsable", f"--output={output}", f"--chdir={cwd}", *options]
        job_id = self.run(*argv, str(script), *arguments).split(";")[0]
        return SlurmJob(self, job_id, cwd / f"slurm-{job_id}.out")

    def queue(self) -> str:
        """What a user sees now: jobs, states, nodes."""
        listed = self.run("squeue", "--format=%.5i %.15j %.9T %.5D %N", check=False)
        return f"$ squeue   # at {time.strftime('%H:%M:%S')}\n{listed}"

    def logs(self) -> str:
        tails = []
        for path in sorted(self.folder.glob("*.log")):
            tails.append(f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]))
        return "\n".join(tails)

    def _start_munge(self) -> Path:
        key, munge_socket = self.folder / "munge.key", self.folder / "munge.sock"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        # --force: a folder that others cannot enter is what we want, and munged warns of.
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}",
            f"--pid-file={self.folder / 'munged.pid'}", f"--seed-file={self.folder / 'munge.seed'}",
            f"--log-file={self.folder / 'munge.log'}",
        )  # fmt: skip
        wait_until(munge_socket.exists, self.logs)
        return munge_socket

    def _daemon(self, name: str, *arguments: str) -> None:
        suffix = arguments[-1] if name == "slurmd" else ""
        with (self.folder / f"{name}{suffix}.log").open("ab") as log:
            child = subprocess.Popen(
                [_program(name) or name, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child)


class SlurmJob:
    """One queued, running or ended job."""

    def __init__(self, cluster: SlurmCluster, job_id: str, output: Path) -> None:
        self.cluster = cluster
        self.job_id = job_id
        self.output = output

    def field(self, name: str) -> str:
        """A field of `scontrol show job`, e.g. JobState, NodeList, ExitCode."""
        shown = self.cluster.run("scontrol", "show", "job", self.job_id, "--oneliner")
        return dict(word.partition("=")[::2] for word in shown.split()).get(name, "")

    @property
    def state(self) -> str:
        return self.field("JobState")

    @property
    def exit_code(self) -> int:
        return int(self.field("ExitCode").split(":")[0])

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait(self, deadline_s: float) -> str:
        """The state it ended in."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
        wait_until(lambda: self.state in ended, lambda: self.story(), deadline_s)
        return self.state

    def wait_running(self, deadline_s: float = 30.0) -> None:
        wait_until(lambda: self.state == "RUNNING", lambda: self.story(), deadline_s)

    def signal_script(self, name: str) -> None:
        """As SLURM does with `--signal=B:NAME@...`: to the shell of the batch script only."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", self.job_id)

    def cancel(self) -> None:
        self.cluster.run("scancel", self.job_id, check=False)

    def story(self) -> str:
        shown = self.cluster.run("scontrol", "show", "job", self.job_id, check=False)
        return f"{shown}\n{self.cluster.queue()}\n== {self.output}\n{self.text[-6000:]}"


@contextmanager
def running_cluster(num_nodes: int = 4, cpus_per_node: int = 8) -> Iterator[SlurmCluster]:
    """Unix socket paths are short, so the folder is not below the test's own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ff-slurm-")))
        cluster = SlurmCluster(folder, num_nodes, cpus_per_node)
        stack.callback(cluster.stop)
        cluster.start()
        yield cluster


def write_conf(folder: Path, names: Sequence[str], cpus: int, munge_socket: Path) -> None:
    ports = free_ports(1 + len(names))
    user, host = getpass.getuser(), socket.gethostname()
    for name in ("state", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir()
    lines = [
        "ClusterName=flexfloor",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        # Nodes claim more CPUs than the host has: they stand for whole machines, whose ranks share its cores.
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SchedulerType=sched/backfill",
        # A queued job starts as soon as a node is free, not up to a minute later.
        "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1,default_queue_depth=10",
        "AccountingStorageType=accounting_storage/none",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "MailProg=/bin/true",
        # Seconds between SIGTERM and SIGKILL at a cancel or the time limit.
        "KillWait=30",
        # Time limits are whole minutes otherwise; 0 lets a job run over by nothing.
        "OverTimeLimit=0",
    ]
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"
        for name, port in zip(names, ports[1:], strict=True)
    ]
    lines += [f"PartitionName=test Nodes={','.join(names)} Default=YES MaxTime=INFINITE OverSubscribe=NO"]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def free_ports(count: int) -> list[int]:
    """Held together until all are chosen, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(
    holds: Callable[[], bool], story: Callable[[], str], deadline_s: float = _START_DEADLINE_S
) -> None:
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s:\n{story()}"
        time.sleep(_POLL_S)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
