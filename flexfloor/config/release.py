"""The `release` group: what becomes of a worker that has left the EP group."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from flexfloor.config.checks import complete, positive, require
from flexfloor.config.choices import ReleaseUse


@dataclass(kw_only=True)
class ReleaseConfig:
    """What becomes of a worker that has left the EP group."""

    use: ReleaseUse = MISSING
    command: list[str] = field(default_factory=list)
    """`use=command`: gets FLEXFLOOR_EP_RANKS and FLEXFLOOR_NODES in its environment; ended before the rejoin."""
    command_timeout_s: float = 30.0
    """How long the command may take to end once it was asked to (SIGTERM); then it is killed."""

    def __post_init__(self) -> None:
        complete(self, "release")
        positive(self, "release", "command_timeout_s")
        runs = self.use is ReleaseUse.command
        require(
            bool(self.command) == runs,
            "release.command",
            self.command,
            "names no command to run" if runs else f"nothing runs it with release.use={self.use.value}",
            "set release.command=[PROGRAM,ARGUMENT,...]" if runs else "leave it out, or set release=command",
        )
