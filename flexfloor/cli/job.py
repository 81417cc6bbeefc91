"""What the Hydra commands share: compose, run one job or a sweep of them, one line for what is refused.

Exit codes: 0 done; 1 a failure during a run; 2 the user's mistake, refused before any process starts;
75 saved and ended before its last step, on SIGUSR1; 130 interrupted. In a multirun every job runs, whatever
became of those before it; the largest code counts.
HYDRA_FULL_ERROR=1 shows stack traces instead of one-line errors.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hydra
from omegaconf import DictConfig

from flexfloor.cli.arguments import overrides_first
from flexfloor.cli.compose import CONF_DIR
from flexfloor.cli.refusals import USER_ERRORS, explain
from flexfloor.cli.resume import with_resume
from flexfloor.config import TrainConfig
from flexfloor.errors import FlexfloorError

FAILED = 1
REFUSED = 2
INTERRUPTED = 130
_FULL_ERROR = "HYDRA_FULL_ERROR"

_logger = logging.getLogger(__name__)


def run_command(config_name: str, config_type: type[Any], run: Callable[[DictConfig], int]) -> int:
    """Calls `run` with the composed configuration of every job of the command line; gives the exit code."""
    wants_traces = os.environ.get(_FULL_ERROR) == "1"
    try:
        sys.argv[1:] = overrides_first(_arguments(sys.argv[1:], config_type))
    except USER_ERRORS as error:
        return _refuse(error, config_type, wants_traces)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=config_name)
    def job(node: DictConfig) -> None:
        codes.append(_run_job(node, config_type, run, wants_traces))

    try:
        with _hydra_raises():
            job()
    except USER_ERRORS as error:
        return _refuse(error, config_type, wants_traces)
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED
    return max(codes, default=0)


def _arguments(arguments: list[str], config_type: type[Any]) -> list[str]:
    return with_resume(arguments) if config_type is TrainConfig else arguments


def _run_job(
    node: DictConfig, config_type: type[Any], run: Callable[[DictConfig], int], wants_traces: bool
) -> int:
    try:
        return run(node)
    except USER_ERRORS as error:
        return _refuse(error, config_type, wants_traces)
    except FlexfloorError as error:
        if wants_traces:
            traceback.print_exception(error)
        _print_error("\n".join([str(error), *getattr(error, "__notes__", ())]))
        return FAILED
    except Exception:
        # Hydra would keep it until the last job of a multirun and then show the first one only.
        _logger.exception("the run failed")
        return FAILED


def _refuse(error: Exception, config_type: type[Any], wants_traces: bool) -> int:
    if wants_traces:
        traceback.print_exception(error)
    _print_error(explain(error, sys.argv[1:], config_type))
    return REFUSED


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Hydra prints errors of composition itself and exits, unless this variable asks for the exception."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before
