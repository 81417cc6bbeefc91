"""Reward functions with every fault that a user's may have; the response text says which one."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from flexfloor.types import Prompt

not_a_function = 3


def faulty(prompt: Prompt, response_text: str) -> object:
    fault, _, argument = response_text.partition(" ")
    match fault:
        case "hang":
            Path(argument).write_text(str(os.getpid()))
            threading.Event().wait()
        case "hang_with_child":
            child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            Path(argument).write_text(str(child.pid))
            threading.Event().wait()
        case "raise":
            raise KeyError("no such key")
        case "sys_exit":
            sys.exit(1)
        case "os_exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "nan":
            return float("nan")
        case "none":
            return None
        case "true":
            return True
        case "print":
            print("printed by a reward")
            os.write(1, b"written by a reward\n")
            print("warned by a reward", file=sys.stderr)
        case "pid":
            return float(os.getpid())
        case "interrupt":
            os.kill(os.getpid(), signal.SIGKILL)
    return 0.5


def length(prompt: Prompt, response_text: str, *, scale: float = 1.0) -> float:
    return scale * len(response_text)


def needs_more(prompt: Prompt, response_text: str, threshold: float) -> float:
    return threshold
