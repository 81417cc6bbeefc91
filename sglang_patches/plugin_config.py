"""What `flexfloor-serve` tells the plugin in each process of the server: one JSON file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

COLLECTIVES = ("gloo", "shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """The plugin's configuration, the same in every process of one server."""

    device: str
    """Value of SGLang's `--device`; rows for the CPU are active only when it is `cpu`."""
    collectives: str = "gloo"
    """`gloo` or `shm`: what carries the collectives of the EP group. `shm` works on one host's CPUs only."""
    left_out: tuple[str, ...] = ()
    """Targets of catalog rows not to install, to measure what a row is worth. For benchmarks only."""

    def __post_init__(self) -> None:
        if self.collectives not in COLLECTIVES:
            raise ValueError(f"collectives={self.collectives!r}, must be one of {', '.join(COLLECTIVES)}")


def read(path: str) -> PluginConfig:
    """Read and check the file. Raises ValueError naming the file and what is wrong with it."""
    try:
        raw = json.loads(Path(path).read_text(encoding="ascii"))
        return PluginConfig(**{**raw, "left_out": tuple(raw.get("left_out", ()))})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"plugin configuration {path} cannot be used: {error}") from error


def dump(config: PluginConfig) -> str:
    """The file's text."""
    return json.dumps(asdict(config))
