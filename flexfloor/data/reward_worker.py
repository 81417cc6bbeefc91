"""The process in which reward functions run: resolves one function, then answers one request at a time.

Started by reward_pool.py as `python -m flexfloor.data.reward_worker FD`, not through multiprocessing:
that would import the driver's main module again, and with it all that the driver needs.

Messages over the pipe: RewardSpec in; ("ready", "") or ("failed", why) out; then (prompt, response_text)
in, ("taken", "") and then ("score", float) or ("failed", why) out, until the pipe closes. "taken" tells a
worker that the response killed from one that was dead before it.
"""

import faulthandler
import math
import numbers
import os
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from flexfloor.data.rewards import RewardFunction, resolve_reward
from flexfloor.types import Prompt

Reply = tuple[str, float | str]
_PARENT_CHECK_S = 1.0


def score(function: RewardFunction, prompt: Prompt, response_text: str) -> Reply:
    """Call the function; whatever it raises or returns becomes a reply."""
    try:
        reward = function(prompt, response_text)
    # Anything that user code can raise, sys.exit() included, belongs to this one response.
    except BaseException as error:
        return "failed", f"raised {_described(error)}"
    # numbers.Real covers numpy's floats; bool is one too, but stands for a forgotten conversion.
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real):
        return "failed", f"returned {type(reward).__name__} {reward!r}, not a float"
    if not math.isfinite(reward):
        return "failed", f"returned {float(reward)}, which is not finite"
    return "score", float(reward)


def serve(pipe: Connection) -> None:
    """Answer until the pool closes the pipe."""
    try:
        function = resolve_reward(pipe.recv())
    except BaseException as error:
        pipe.send(("failed", f"raised {_described(error)}"))
        return
    pipe.send(("ready", ""))
    while True:
        prompt, response_text = pipe.recv()
        pipe.send(("taken", ""))
        pipe.send(score(function, prompt, response_text))


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _exit_with_parent(parent_pid: int) -> None:
    # A stuck reward never sees the pipe close, so an orphan has to end itself.
    while not threading.Event().wait(_PARENT_CHECK_S):
        if os.getppid() != parent_pid:
            os._exit(1)


def main() -> None:
    faulthandler.enable()
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the pool has closed
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
