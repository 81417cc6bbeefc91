"""A headless Chromium over its DevTools pipe: no port, no network, a deadline on every wait."""

import base64
import contextlib
import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_UNPACKED = ROOT / ".venv" / "chromium" / "run"
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
_DEADLINE_S = 60.0


def find_browser() -> str | None:
    """What `scripts/browser.sh` finds or unpacks."""
    chosen = os.environ.get("FLEXFLOOR_CHROMIUM")
    if chosen:
        return chosen
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    return found or (str(_UNPACKED) if _UNPACKED.exists() else None)


class BrowserPage:
    """One tab. Everything that the page says to the console, throws or asks of the network is kept."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + _DEADLINE_S
        while "Page.loadEventFired" not in self._events:
            self._take(until)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, width: int, height: int) -> bytes:
        """PNG of the top of the page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        wanted = self._last_id
        message = {"id": wanted, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _DEADLINE_S
        while True:
            answer = self._take(until)
            if answer.get("id") == wanted:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _take(self, until: float) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            while b"\0" not in self._buffer:
                if not selector.select(until - time.monotonic()):
                    raise TimeoutError("the browser did not answer in time")
                data = os.read(self._read_fd, 1 << 16)
                if not data:
                    raise AssertionError("the browser has ended")
                self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, told: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(told["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])


@contextlib.contextmanager
def browser_page(browser: str, profile: Path) -> Iterator[BrowserPage]:
    """A page in a browser of its own, which ends with the block."""
    to_read, browser_writes = os.pipe()
    browser_reads, to_write = os.pipe()
    # Chromium speaks on descriptors 3 and 4; the shell puts the pipe's ends there.
    shell = f'exec "$0" "$@" 3<&{browser_reads} 4>&{browser_writes}'
    command = ["bash", "-c", shell, browser, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    log = (profile.parent / "browser.log").open("wb")
    process = subprocess.Popen(command, pass_fds=(browser_reads, browser_writes), stderr=log, stdout=log)
    for descriptor in (browser_reads, browser_writes):
        os.close(descriptor)
    try:
        yield BrowserPage(to_read, to_write)
    finally:
        process.kill()
        process.wait(timeout=_DEADLINE_S)
        os.close(to_read)
        os.close(to_write)
        log.close()
