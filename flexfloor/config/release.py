"""The `release` group: what becomes of a worker that has left the EP group."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from flexfloor.config.checks import at_least, complete, positive, require
from flexfloor.config.choices import ReleaseUse


@dataclass(kw_only=True)
class ReleaseConfig:
    """What becomes of a worker that has left the EP group."""

    use: ReleaseUse = MISSING
    """park | exit | command | slurm | logprobs: the group option of the same name sets it."""
    every_step: bool = False
    """`use=exit`: workers end in every step, and the server starts anew before the next one. Otherwise `exit`
    and `slurm` act in the last step only, and in the steps before it workers park."""
    restart_s: float = 60.0
    """`every_step`: by how much a restart of the server delays the next step beyond its training
    (`time/restart_s` of an earlier run). No worker ends for a gain that is less; 0: a restart is free."""
    command: list[str] = field(default_factory=list)
    """`use=command`: finds FLEXFLOOR_EP_RANKS and FLEXFLOOR_NODES in its environment; ended at the rejoin."""
    command_timeout_s: float = 30.0
    """How long the command may take to end once it was asked to (SIGTERM); then it is killed."""

    def __post_init__(self) -> None:
        complete(self, "release")
        positive(self, "release", "command_timeout_s")
        at_least(self, "release", 0, "restart_s")
        require(
            not self.every_step or self.use is ReleaseUse.exit,
            "release.every_step",
            self.every_step,
            f"release.use={self.use.value} ends no worker before the last step",
            "leave it out, or set release=exit",
        )
        runs = self.use is ReleaseUse.command
        require(
            bool(self.command) == runs,
            "release.command",
            self.command,
            "names no command to run" if runs else f"nothing runs it with release.use={self.use.value}",
            "set release.command=[PROGRAM,ARGUMENT,...]" if runs else "leave it out, or set release=command",
        )
