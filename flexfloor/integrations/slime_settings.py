"""What slime's `--custom-config-path` sets for FlexFloor: YAML keys that slime puts on its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_PREFIX = "flexfloor_"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeSettings:
    """Each field is a key `flexfloor_NAME` of the YAML file."""

    folder: str | None = None
    """`--flexfloor-folder` of the servers, readable here. Its token is the key without an admin key."""
    admin_key: str | None = None
    """SGLang's `--admin-api-key`. Default: slime's own --sglang-admin-api-key."""
    engine_urls: tuple[str, ...] = ()
    """URLs of the servers. Default: those that slime's router lists."""
    history: str | None = None
    """File with the lengths of earlier responses (`flexfloor-history`). None: even counts only."""
    dataset: str = "slime"
    """Its name in the history."""
    run_id: str | None = None
    """This run's name in the history. Default: a new one in each process."""
    max_resubmits: int = 8
    """How often a response that lost its rank is continued before slime gets it back aborted."""
    rejoin_timeout_s: float = 600.0
    """Wait at the begin and the end of a step until every rank is back."""

    def __post_init__(self) -> None:
        if self.max_resubmits < 0 or not self.rejoin_timeout_s > 0:
            raise ValueError(
                f"flexfloor_max_resubmits={self.max_resubmits}, "
                f"flexfloor_rejoin_timeout_s={self.rejoin_timeout_s}. Fix: give 0 or more, and a time above 0"
            )

    @classmethod
    def from_args(cls, args: Any) -> "SlimeSettings":
        """Raises ValueError naming a `flexfloor_` key that there is not."""
        given = {
            name.removeprefix(_PREFIX): value
            for name, value in vars(args).items()
            if name.startswith(_PREFIX) and value is not None
        }
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            keys = ", ".join(_PREFIX + name for name in known)
            raise ValueError(
                f"{', '.join(_PREFIX + name for name in unknown)}: no such key. Fix: one of {keys}"
            )
        return cls(**_with_defaults(given, vars(args)))


def _with_defaults(given: dict[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    if "engine_urls" in given:
        given["engine_urls"] = tuple(given["engine_urls"])
    if "admin_key" not in given and args.get("sglang_admin_api_key"):
        given["admin_key"] = args["sglang_admin_api_key"]
    return given
