"""`resume=RUN_DIR`: the configuration of a run that goes on is the one in its folder.

Overrides beside it change only what a resume may change (`flexfloor.config.resume_rules`); a group such as
`trainer=...` is not chosen again.
"""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from flexfloor.config import TrainConfig
from flexfloor.config.checks import require
from flexfloor.config.resume_rules import SHOWN, may_change

CONFIG_FILE = "config.yaml"
_PREFIX = "resume="
_MULTIRUN = ("-m", "--multirun")
_MASK = "***"
_OPEN = ("rollout.server_args.", "data.task_options.", "data.reward_options.")


def with_resume(arguments: Sequence[str]) -> list[str]:
    """The command line with Hydra's own output folder set to that of the run that goes on.

    Raises ConfigError where there is no such run.
    """
    named = [text.removeprefix(_PREFIX) for text in arguments if text.startswith(_PREFIX)]
    if not named or named[-1] in ("", "null"):
        return list(arguments)
    folder = named[-1].strip("'\"")
    problem = "there is no run with a config.yaml in it"
    require((Path(folder) / CONFIG_FILE).is_file(), "resume", folder, problem, "name the folder of a run")
    several = any(flag in _MULTIRUN for flag in arguments)
    require(not several, "resume", folder, "goes on with one run, not with several", "leave --multirun out")
    # The old `.hydra` folder keeps telling how the run was started first.
    added = ["hydra.output_subdir=null"]
    if not any(text.startswith("hydra.run.dir=") for text in arguments):
        quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
        added.append(f"hydra.run.dir='{quoted}'")
    return [*arguments, *added]


def resumed(node: DictConfig) -> DictConfig:
    """The configuration to run: `node` as it was composed, or that of the run which it says to go on with."""
    if node.resume is None:
        return node
    return resumed_config(Path(node.resume), list(HydraConfig.get().overrides.task))


def resumed_config(folder: Path, overrides: Sequence[str]) -> DictConfig:
    """Raises ConfigError for an override of something that has to stay."""
    base = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(folder / CONFIG_FILE))
    assert isinstance(base, DictConfig)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group not in ("resume", "run_dir"):
            _apply(base, override)
    base.run_dir = base.resume = str(folder)
    _refuse_masked(base)
    return base


def _apply(base: DictConfig, override: Override) -> None:
    key, value = override.key_or_group, override.value()
    text: str = override.get_value_string()
    is_group = isinstance(OmegaConf.select(base, key), DictConfig) and not isinstance(value, dict)
    is_group = is_group or key == "experiment" or "/" in key
    fix = "leave it out, and name single keys: GROUP.KEY=VALUE"
    require(not is_group, key, text, "a resumed run keeps the groups that it was started with", fix)
    fix = f"leave it out. What may change: {SHOWN}"
    problem = "would change what the run draws or learns"
    # What was masked is given again; that it is the same value as before is the user's word.
    is_given_again = _is_masked(OmegaConf.select(base, key))
    require(may_change(key) or is_given_again, key, text, problem, fix)
    OmegaConf.update(base, key, value, force_add=override.is_add())


def _refuse_masked(node: DictConfig, prefix: str = "") -> None:
    """Secrets are not kept in a run's folder."""
    for name, value in node.items_ex(resolve=False):
        if isinstance(value, DictConfig):
            _refuse_masked(value, f"{prefix}{name!s}.")
        key, problem = f"{prefix}{name!s}", "was kept secret in the run's config.yaml"
        # Hydra takes a new entry of an open group with a plus only.
        plus = "+" if prefix in _OPEN else ""
        require(not _is_masked(value), key, _MASK, problem, f"give it again: {plus}{key}=...")


def _is_masked(value: object) -> bool:
    return isinstance(value, str) and _MASK in value
