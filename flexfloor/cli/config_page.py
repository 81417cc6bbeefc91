"""Renders the schema and the presets. `python -m flexfloor.cli.config_page` writes the docs' page of them."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from flexfloor.cli.compose import CONF_DIR
from flexfloor.config import TrainConfig
from flexfloor.config.plan import PlanConfig
from flexfloor.config.reference import Preset, groups_of, render_group
from flexfloor.config.simulate import SimulateConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration_reference.md"

_HEAD = """# Configuration reference

Generated from the schema and the presets by `python -m flexfloor.cli.config_page`; edit those, not this page.
How a configuration is composed, and what is refused: [configuration.md](configuration.md).

A key is set on the command line as `KEY=VALUE`, a preset is chosen as `GROUP=NAME`. *required* means that the
schema has no default: a preset or the command line must set the key.
"""
_RUN = """## The run

Keys of `flexfloor-train` outside the groups. `conf/train.yaml` sets `run_dir`, an experiment `num_steps`.
"""
_EXPERIMENTS = """## Experiments

Whole runs: `flexfloor-train experiment=NAME`.
"""
_PLAN = """## flexfloor-plan

Besides `cluster` and `model`: how few ranks can serve, [floor.md](floor.md).
"""
_SIMULATE = """## flexfloor-simulate

Besides `cluster` and `model`: what scheduling would save on given lengths, [simulate.md](simulate.md).
"""


def render() -> str:
    """The page's text."""
    train = [render_group(name, group, presets(name)) for name, group in groups_of(TrainConfig)]
    experiments = render_presets("experiment")
    parts = [_HEAD, _RUN, render_group("", TrainConfig, ()), *train, _EXPERIMENTS, experiments]
    parts += [_PLAN, render_group("", PlanConfig, ()), _SIMULATE, render_group("", SimulateConfig, ())]
    trace = dict(groups_of(SimulateConfig))["trace"]
    return "\n".join([*parts, render_group("trace", trace, ())])


def presets(group: str) -> list[Preset]:
    """The options of a group by name; none for a group inside another one."""
    defaults = OmegaConf.load(CONF_DIR / "train.yaml").defaults
    chosen = {name for entry in defaults if isinstance(entry, DictConfig) for name in [entry.get(group)]}
    return [
        Preset(name=file.stem, text=file.read_text(encoding="utf-8"), is_default=file.stem in chosen)
        for file in sorted((CONF_DIR / group).glob("*.yaml"))
    ]


def render_presets(group: str) -> str:
    rows = ["| experiment | the question that it answers |", "|---|---|"]
    rows += [f"| `{preset.name}` | {preset.summary} |" for preset in presets(group)]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
