"""One clear error for what a user got wrong: key, value, fix; never a traceback."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from flexfloor.config import TrainConfig
from flexfloor.errors import ConfigError, DataError

USER_ERRORS = (ConfigError, DataError, HydraException, OmegaConfBaseException)

_OPEN_KEYS = ("rollout.server_args", "data.task_options", "data.reward_options")
"""Keys that hold names FlexFloor does not know."""
_NO_SUCH_OVERRIDE = re.compile(r"Could not override '(?P<key>[^']+)'")
_FULL_KEY = re.compile(r"full_key: (?P<key>\S+)")


def explain(error: Exception, overrides: Sequence[str], config_type: type[Any] = TrainConfig) -> str:
    """Text of a user's error. `overrides` is the command line, where the wrong value most often stands."""
    if isinstance(error, ConfigError | DataError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _explain_missing_file(error)
    if isinstance(error, MissingMandatoryValue):
        return _explain_missing_value(str(getattr(error, "full_key", "") or ""))
    key = _key_in(error)
    if key and key not in valid_keys(config_type):
        return _explain_unknown_key(key, overrides, valid_keys(config_type))
    if key in _OPEN_KEYS and "is not in struct" in str(_root_cause(error)):
        return f"{key}: its entries are added one by one. Fix: write +{key}.NAME=VALUE"
    if key:
        fix = f"give {key} a value of its type; --help shows an example"
        return f"{key}={_value_of(key, overrides)}: {_first_line(_root_cause(error))}. Fix: {fix}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as KEY=VALUE. Fix: put the value in quotes, KEY='\"VALUE\"'"
    return f"{_first_line(error)}. Fix: correct the command line; --help lists groups and keys"


def valid_keys(config_type: type[Any] = TrainConfig, prefix: str = "") -> list[str]:
    """Every key of the configuration, groups included, in dotted form."""
    return list(_walk(config_type, prefix))


def _walk(config_type: type[Any], prefix: str) -> Iterator[str]:
    hints = get_type_hints(config_type)
    for field in fields(config_type):
        yield f"{prefix}{field.name}"
        if is_dataclass(hints[field.name]):
            yield from _walk(hints[field.name], f"{prefix}{field.name}.")


def _explain_missing_file(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = error.options
    if not options:
        return f"{_first_line(error)}. Fix: check --config-dir and --config-name"
    guess = _did_you_mean(option, options)
    return f"{group}={option}: there is no such option{guess}. Fix: choose one of {', '.join(options)}"


def _explain_missing_value(key: str) -> str:
    hint = "choose an experiment, e.g. experiment=quickstart, or " if key == "num_steps" else ""
    return f"{key}: has no value. Fix: {hint}add {key}=... to the command line or your preset"


def _explain_unknown_key(key: str, overrides: Sequence[str], known: Sequence[str]) -> str:
    value = _value_of(key, overrides)
    if key.startswith(tuple(f"{name}." for name in _OPEN_KEYS)):
        return f"{key}={value}: is a new entry. Fix: write +{key}={value}"
    guess = _did_you_mean(key, [*known, "experiment"])
    shown = f"{key}={value}" if value else key
    return f"{shown}: there is no such key{guess}. Fix: use a key that --help lists"


def _did_you_mean(wrong: str, known: Iterable[str]) -> str:
    known = list(known)
    # A key without its group, or in another one (`ep_size`, `trainer.temperature`), is far by letters alone.
    near = [key for key in known if key.rpartition(".")[2] == wrong.rpartition(".")[2]]
    near = near or get_close_matches(wrong, known, n=1, cutoff=0.6)
    return f". Did you mean {' or '.join(near)}?" if near else ""


def _key_in(error: Exception) -> str | None:
    """The key that Hydra or OmegaConf complains about, as far as the text or the exception says."""
    override = _NO_SUCH_OVERRIDE.search(str(error))
    if override:
        return override["key"]
    cause = _root_cause(error)
    full_key = getattr(cause, "full_key", None)
    if full_key:
        return str(full_key)
    text = _FULL_KEY.search(f"{error}\n{cause}")
    return text["key"] if text else None


def _root_cause(error: BaseException) -> BaseException:
    is_wrapper = isinstance(error, ConfigCompositionException) and error.__cause__ is not None
    return _root_cause(error.__cause__) if is_wrapper and error.__cause__ else error


def _value_of(key: str, overrides: Sequence[str]) -> str:
    """Value that the command line gives to a key; the last one wins."""
    values = [text.partition("=")[2] for text in overrides if text.partition("=")[0].lstrip("+~") == key]
    return values[-1] if values else ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
