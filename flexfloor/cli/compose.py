"""From YAML to dataclasses: where the presets lie, the schema they are typed by, and the one conversion."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from flexfloor.config import TrainConfig
from flexfloor.errors import ConfigError
from flexfloor.masking import masked, masked_text

ConfigT = TypeVar("ConfigT")

CONF_DIR = Path(__file__).parent / "conf"
"""In a checkout a link to the top-level `conf/`; in a wheel the files themselves."""


def register() -> None:
    """Make `train_schema` and the resolvers of train.yaml known to Hydra; may be called again."""
    ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
    OmegaConf.register_new_resolver("run_name", _run_name, replace=True)


def compose(overrides: Sequence[str]) -> DictConfig:
    """What the command line with these overrides composes, without a job; for tests and tools."""
    register()
    with hydra.initialize_config_dir(str(CONF_DIR.resolve()), version_base="1.3"):
        return hydra.compose("train", overrides=list(overrides))


def to_train_config(node: DictConfig) -> TrainConfig:
    """Resolved, complete and typed; raises what OmegaConf or the rules of a group refuse."""
    return to_config(node, TrainConfig)


def to_config(node: DictConfig, config_type: type[ConfigT]) -> ConfigT:
    """The same for the schema of another command."""
    _refuse_added_keys(node)
    config = OmegaConf.to_object(node)
    assert isinstance(config, config_type)
    return config


def save_resolved(node: DictConfig, run_dir: str) -> None:
    """Leave the values that a run really used in its folder, every default and interpolation written out.

    Whole or not at all: a resume begins with this file. Secrets are masked, here and in what Hydra left.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _save(masked(OmegaConf.to_container(node, resolve=True)), folder / "config.yaml")
    for path in sorted((folder / ".hydra").glob("*.yaml")):
        left = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        # Overrides are texts such as `key=value`.
        texts = [masked_text(str(line)) for line in left] if isinstance(left, list) else masked(left)
        if texts != left:
            _save(texts, path)


def _save(content: Any, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    OmegaConf.save(OmegaConf.create(content), part)
    part.replace(path)


def _refuse_added_keys(node: DictConfig, prefix: str = "") -> None:
    """Hydra's `+KEY=VALUE` opens a typed group, and the value would then be ignored in silence."""
    group_type = OmegaConf.get_type(node)
    if not is_dataclass(group_type):
        return
    known = {field.name for field in fields(group_type)}
    for item, value in node.items_ex(resolve=False):
        name = str(item)
        key = f"{prefix}{name}"
        if name not in known:
            raise ConfigError(key, value, "there is no such key", "remove it, or use a key that --help lists")
        if isinstance(value, DictConfig):
            _refuse_added_keys(value, f"{key}.")


def _run_dir() -> str:
    """Output folder of this job; before a job starts (`--cfg job --resolve`) the one that it would get."""
    hydra = HydraConfig.get()
    started = not OmegaConf.is_missing(hydra.runtime, "output_dir")
    return str(hydra.runtime.output_dir if started else hydra.run.dir)


def _run_name(*, _root_: DictConfig) -> str:
    """Name of the chosen experiment."""
    choices = OmegaConf.select(_root_, "hydra.runtime.choices")
    # `--cfg job` cuts Hydra's own node off the tree and keeps it here.
    choices = HydraConfig.get().runtime.choices if choices is None else choices
    return (choices.get("experiment") or "custom").replace("/", "_")
