"""Rules of the data group: what each source needs, and which reward can score it."""

from typing import TYPE_CHECKING

from flexfloor.config.checks import require
from flexfloor.config.choices import DataSource

if TYPE_CHECKING:
    from flexfloor.config.schema import DataConfig

BUILT_IN_REWARDS = ("exact", "regex", "math_verify", "reasoning_gym", "arithmetic")
_BOUND_TO_SOURCE = ("reasoning_gym", "arithmetic")
"""Rewards that score prompts of the source of the same name only."""


def check_source(data: "DataConfig") -> None:
    source = f"data.source={data.source}"
    if data.is_generated:
        unread = f"{source} makes its prompts and reads no file"
        require(data.path is None, "data.path", data.path, unread, "set data.path=null")
        endless = f"{source} has no size of its own"
        require(data.num_prompts is not None, "data.num_prompts", None, endless, "set data.num_prompts=160")
    else:
        fix = "set data.path to a file or folder"
        require(data.path is not None, "data.path", None, f"{source} reads files, and none is named", fix)
    _check_task(data)


def _check_task(data: "DataConfig") -> None:
    needs_task = data.source is DataSource.reasoning_gym
    problem = f"data.source={data.source} {'needs a' if needs_task else 'takes no'} task"
    fix = "set data.task, e.g. data.task=chain_sum" if needs_task else "set data.task=null"
    require(bool(data.task) == needs_task, "data.task", data.task, problem, fix)


def check_reward(data: "DataConfig") -> None:
    is_known = data.reward in BUILT_IN_REWARDS or split_reward_path(data.reward) is not None
    fix = f"set data.reward to one of {', '.join(BUILT_IN_REWARDS)}, or to module:function"
    require(is_known, "data.reward", data.reward, "is not a reward function", fix)
    scores = data.reward not in _BOUND_TO_SOURCE or data.reward == data.source
    problem = f"scores prompts of data={data.reward} only, and data.source={data.source}"
    require(scores, "data.reward", data.reward, problem, f"set data={data.reward}, or another data.reward")


def split_reward_path(reward: str) -> tuple[str, str] | None:
    """Module and function of `module:function`; None for every other text."""
    module, _, function = reward.partition(":")
    is_path = all(part.isidentifier() for part in module.split(".")) and function.isidentifier()
    return (module, function) if is_path else None
