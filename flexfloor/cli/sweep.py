"""The jobs of a sweep, in the order and with the numbers that `--multirun` gives them."""

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Plain overrides, a list a job. Raises ValueError for what cannot be read as KEY=VALUE[,VALUE...]."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ValueError(f"{error.override}: cannot be read as KEY=VALUE[,VALUE...]") from error
    choices = []
    for override in parsed:
        key = override.get_key_element()
        if override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([f"{key}={override.get_value_element_as_str()}"])
    return [list(job) for job in itertools.product(*choices)]


def sweep_job(overrides: Sequence[str], number: int) -> list[str]:
    """Raises ValueError where there is no such job."""
    jobs = sweep_jobs(overrides)
    if not 0 <= number < len(jobs):
        raise ValueError(
            f"job {number}: the sweep has {len(jobs)} jobs. Fix: submit with --array=0-{len(jobs) - 1}"
        )
    return jobs[number]
