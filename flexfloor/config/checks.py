"""Building blocks of config rules: each raises a ConfigError that names the full Hydra key, value and fix."""

import math
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from omegaconf import MISSING

from flexfloor.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_SEED = 2**31
"""Exclusive: sampling seeds have 31 bits."""


def require(holds: bool, key: str, value: object, problem: str, fix: str) -> None:
    if not holds:
        raise ConfigError(key, value, problem, fix)


def complete(config: "DataclassInstance", group: str) -> None:
    """Refuse a half-filled config, so that the rules that follow compare numbers and never a placeholder."""
    for field in fields(config):
        key = f"{group}.{field.name}" if group else field.name
        value = getattr(config, field.name)
        require(is_dataclass(value) or value != MISSING, key, value, "has no value", f"set {key}=...")


def at_least(config: object, group: str, minimum: float, *names: str) -> None:
    """Refuse any of the fields that is below `minimum` or not finite; an unset optional field passes."""
    for name in names:
        value = getattr(config, name)
        holds = value is None or (math.isfinite(value) and value >= minimum)
        key = f"{group}.{name}"
        require(
            holds,
            key,
            value,
            f"must be a finite number, at least {minimum}",
            f"set {key} to {minimum} or more",
        )


def positive(config: object, group: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        holds = value is None or (math.isfinite(value) and value > 0)
        key = f"{group}.{name}"
        require(holds, key, value, "must be a finite number above 0", f"set {key} above 0")


def within(config: object, group: str, low: float, high: float, *names: str) -> None:
    """Refuse any of the fields outside [low, high)."""
    for name in names:
        value = getattr(config, name)
        key = f"{group}.{name}"
        require(
            low <= value < high,
            key,
            value,
            f"must be at least {low} and below {high}",
            f"set {key} in that range",
        )


def divides(key: str, value: int, other_key: str, other: int, why: str) -> None:
    """Refuse unless `value` divides `other`, and name the values that do."""
    fitting = [n for n in range(1, other + 1) if other % n == 0]
    shown = ", ".join(str(n) for n in fitting[:12]) + (", ..." if len(fitting) > 12 else "")
    holds = value >= 1 and other % value == 0
    require(holds, key, value, f"does not divide {other_key}={other} ({why})", f"set {key} to one of {shown}")
