"""Reward functions by name: `(prompt, response_text, **options) -> float`.

They run in reward workers (reward_pool.py). A worker calls them in its main thread, which math-verify's own
signal-based time limits need. Libraries are imported when a worker resolves its function, not with this
module.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flexfloor.data import arithmetic, reasoning_gym_tasks
from flexfloor.errors import ConfigError
from flexfloor.types import Prompt

RewardFunction = Callable[[Prompt, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Which reward function, and its keyword options; picklable."""

    name: str
    """`exact`, `regex`, `math_verify`, `reasoning_gym`, `arithmetic`, or `module:function`."""
    options: Mapping[str, Any] = field(default_factory=dict)


def exact(prompt: Prompt, response_text: str) -> float:
    """1.0 iff the response is the answer, white space around both aside."""
    return 1.0 if response_text.strip() == prompt.answer.strip() else 0.0


def regex(prompt: Prompt, response_text: str, *, pattern: str) -> float:
    """1.0 iff group 1 of the last match of `pattern` is the answer, white space around both aside."""
    found = reasoning_gym_tasks.extracted_answer(response_text, pattern)
    return 1.0 if found is not None and found == prompt.answer.strip() else 0.0


def math_verify(prompt: Prompt, response_text: str) -> float:
    """1.0 iff the last mathematical expression of the response equals the answer.

    A response that math-verify cannot parse within its own limit (5 s) scores 0; an answer that it cannot
    parse is an error.
    """
    from math_verify import parse, verify

    gold = parse(prompt.answer)
    if not gold:
        # Plain LaTeX is recognised only inside an environment.
        gold = parse(f"${prompt.answer}$")
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {prompt.answer!r}")
    return 1.0 if verify(gold, parse(response_text)) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltIn:
    function: Callable[..., float]
    library: str | None = None
    package: str | None = None
    """What pip calls it."""


_BUILT_IN = {
    "exact": _BuiltIn(function=exact),
    "regex": _BuiltIn(function=regex),
    "math_verify": _BuiltIn(function=math_verify, library="math_verify", package="math-verify"),
    "reasoning_gym": _BuiltIn(
        function=reasoning_gym_tasks.score, library="reasoning_gym", package="reasoning-gym"
    ),
    "arithmetic": _BuiltIn(function=arithmetic.score),
}


def check_reward(spec: RewardSpec) -> None:
    """Refuse a reward that could not run, before any process starts: ConfigError with key, value, problem
    and fix.

    A `module:function` is imported by this; the libraries of the built-in ones are only looked for.
    """
    built_in = _BUILT_IN.get(spec.name)
    if built_in is not None and built_in.library and importlib.util.find_spec(built_in.library) is None:
        raise _refused(spec, f"{built_in.library} is not installed", f"pip install {built_in.package}")
    _check_options(spec, built_in.function if built_in else _imported(spec))


def resolve_reward(spec: RewardSpec) -> RewardFunction:
    """The function with its options bound, its library imported; raises ConfigError."""
    check_reward(spec)
    built_in = _BUILT_IN.get(spec.name)
    if built_in is None:
        return partial(_imported(spec), **spec.options)
    if built_in.library:
        importlib.import_module(built_in.library)
    return partial(built_in.function, **spec.options)


def _imported(spec: RewardSpec) -> Callable[..., float]:
    module_name, colon, function_name = spec.name.partition(":")
    names = ", ".join(_BUILT_IN)
    if not (colon and module_name and function_name):
        raise _refused(spec, "unknown reward", f"use one of {names}, or module:function")
    if module_name == "__main__":
        raise _refused(spec, "a worker cannot import __main__", "put the function in a module of its own")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        fix = "correct the module's name, or add its folder to PYTHONPATH"
        raise _refused(spec, f"cannot import {module_name} ({error})", fix) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "has no" if function is None else "has a non-callable"
        fix = f"define {function_name}(prompt, response_text) -> float there"
        raise _refused(spec, f"module {module_name} {what} {function_name!r}", fix)
    return function  # type: ignore[no-any-return]


def _check_options(spec: RewardSpec, function: Callable[..., float]) -> None:
    try:
        inspect.signature(function).bind("prompt", "response_text", **spec.options)
    except TypeError as error:
        fix = f"it takes {inspect.signature(function)}: prompt and response text, then options by keyword"
        raise _refused(spec, f"cannot be called with options {dict(spec.options)}: {error}", fix) from error
    pattern = spec.options.get("pattern")
    if spec.name in _BUILT_IN and pattern is not None:
        _check_pattern(spec, pattern)


def _check_pattern(spec: RewardSpec, pattern: object) -> None:
    key = "data.reward_options.pattern"
    fix = r"write a regular expression with a group around the answer, e.g. '####\s*(.+)'"
    try:
        num_groups = re.compile(pattern).groups if isinstance(pattern, str) else 0
    except re.error as error:
        raise ConfigError(key, pattern, f"not a regular expression ({error})", fix) from error
    if num_groups < 1:
        raise ConfigError(key, pattern, "has no group", fix)


def _refused(spec: RewardSpec, problem: str, fix: str) -> ConfigError:
    return ConfigError("data.reward", spec.name, problem, fix)
