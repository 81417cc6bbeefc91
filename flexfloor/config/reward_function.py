"""Finds the function that `data.reward=module:function` names, by reading source text.

Nothing is imported: a reward module may be slow to load, and it belongs in the reward workers alone.
"""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from flexfloor.config.data_rules import BUILT_IN_REWARDS, split_reward_path
from flexfloor.errors import ConfigError

_KEY = "data.reward"


def check_reward_function(reward: str) -> None:
    path = None if reward in BUILT_IN_REWARDS else split_reward_path(reward)
    if path is None:
        return
    module, function = path
    spec = _find_spec(module)
    if spec is None:
        raise ConfigError(_KEY, reward, f"there is no module {module}", "put its folder on PYTHONPATH")
    if spec.origin is not None and spec.origin.endswith(".py"):
        _check_source_text(reward, function, Path(spec.origin))


def _find_spec(module: str) -> ModuleSpec | None:
    """Like importlib's, but without importing the parent packages."""
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        folders = sys.path if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(".".join(parts[:depth]), folders) if folders is not None else None
        if spec is None:
            return None
    return spec


def _check_source_text(reward: str, function: str, file: Path) -> None:
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(_KEY, reward, f"{file} cannot be read: {error}", "repair the module") from error
    names = dict(_defined_names(body))
    if function not in names and "*" not in names:
        shown = ", ".join(name for name, is_callable in names.items() if is_callable) or "none"
        fix = f"name one of its functions: {shown}"
        raise ConfigError(_KEY, reward, f"{file} defines no {function}", fix)
    if not names.get(function, True):
        raise ConfigError(_KEY, reward, f"{function} in {file} is not a function", "name a function")


def _defined_names(body: list[ast.stmt]) -> Iterator[tuple[str, bool]]:
    """(name, may be callable) of a module's top level; only literal constants are surely not callable."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name, True
        elif isinstance(statement, ast.AsyncFunctionDef):
            yield statement.name, False
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, True) for alias in statement.names)
        elif isinstance(statement, ast.Assign):
            may_call = not isinstance(statement.value, ast.Constant | ast.Dict | ast.List | ast.Tuple)
            yield from ((target.id, may_call) for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.If | ast.Try):
            yield from _defined_names(statement.body)
