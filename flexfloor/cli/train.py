"""`flexfloor-train`: compose, convert, refuse or run.

Exit codes: 0 done; 1 a failure during a run; 2 the user's mistake, refused before any process starts;
130 interrupted. In a multirun every job runs, whatever became of those before it; the largest code counts.
HYDRA_FULL_ERROR=1 shows stack traces instead of one-line errors.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import hydra
from omegaconf import DictConfig

from flexfloor.cli.arguments import overrides_first
from flexfloor.cli.compose import CONF_DIR, register, save_resolved, to_train_config
from flexfloor.cli.refusals import USER_ERRORS, explain
from flexfloor.config.rules import validate
from flexfloor.errors import FlexfloorError

FAILED = 1
REFUSED = 2
INTERRUPTED = 130
_FULL_ERROR = "HYDRA_FULL_ERROR"

_logger = logging.getLogger(__name__)


def main() -> int:
    register()
    sys.argv[1:] = overrides_first(sys.argv[1:])
    codes: list[int] = []
    wants_traces = os.environ.get(_FULL_ERROR) == "1"

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
    def job(node: DictConfig) -> None:
        codes.append(_run_job(node, wants_traces))

    try:
        with _hydra_raises():
            job()
    except USER_ERRORS as error:
        return _refuse(error, wants_traces)
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED
    return max(codes, default=0)


def _run_job(node: DictConfig, wants_traces: bool) -> int:
    try:
        config = to_train_config(node)
        validate(config)
        save_resolved(node, config.run_dir)
        # Imported here, so that --cfg, --help and a refusal never load torch.
        from flexfloor.driver import run

        return run(config)
    except USER_ERRORS as error:
        return _refuse(error, wants_traces)
    except FlexfloorError as error:
        if wants_traces:
            traceback.print_exception(error)
        _print_error(str(error))
        return FAILED
    except Exception:
        # Hydra would keep it until the last job of a multirun and then show the first one only.
        _logger.exception("the run failed")
        return FAILED


def _refuse(error: Exception, wants_traces: bool) -> int:
    if wants_traces:
        traceback.print_exception(error)
    _print_error(explain(error, sys.argv[1:]))
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


if __name__ == "__main__":
    sys.exit(main())
