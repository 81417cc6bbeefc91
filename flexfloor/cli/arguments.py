"""Lets flags stand anywhere among the overrides: `experiment=quickstart --multirun seed=0,1`.

Hydra's parser takes the overrides from one place of the command line only.
"""

from collections.abc import Sequence

_FLAGS_WITH_VALUE = {
    *(
        "--cfg",
        "-c",
        "--package",
        "-p",
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
    ),
    "--experimental-rerun",
}
_FLAGS_WITH_OPTIONAL_VALUE = {"--info", "-i"}


def overrides_first(arguments: Sequence[str]) -> list[str]:
    overrides: list[str] = []
    flags: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_flag = argument.startswith("-") or _is_value(before, argument)
        (flags if is_flag else overrides).append(argument)
    return [*overrides, *flags]


def _is_value(before: str, argument: str) -> bool:
    is_optional = before in _FLAGS_WITH_OPTIONAL_VALUE and "=" not in argument
    return before in _FLAGS_WITH_VALUE or is_optional
