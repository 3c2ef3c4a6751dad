"""A headless Chromium, driven over the DevTools protocol through pipes: no client library."""

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (found := shutil.which(name)) is not None
    ),
    None,
)
SECONDS = 60.0
"""That anything may take."""


class Browser:
    """One page of a browser; made by `browser`."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers = to, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; what happens meanwhile goes to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result = answer["result"]
                assert isinstance(result, dict)
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def open(self, page: Path, width: int, *, scripts: bool = True) -> None:
        """Load a page in a window of this width."""
        self.events.clear()
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send("Page.navigate", url=page.as_uri())
        end = time.monotonic() + SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < end, "the page did not load"
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """What an expression of JavaScript gives, as JSON."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Console messages, log entries and exceptions since the page was opened."""
        self.evaluate("0")  # reads what is under way
        found = ("Runtime.consoleAPICalled", "Log.entryAdded", "Runtime.exceptionThrown")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in found]

    def requests(self) -> list[str]:
        """Addresses that were asked for since then."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its profile in a folder; end it afterwards."""
    assert PROGRAM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    arguments = [
        PROGRAM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",  # reads messages from 3, writes them to 4
    ]
    # High numbers first, so that neither end is overwritten by the other's place.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
    quiet = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1, 2)]
    ends = [(os.POSIX_SPAWN_DUP2, one, place) for one, place in zip(high, (3, 4), strict=True)]
    process = os.posix_spawn(PROGRAM, arguments, os.environ, file_actions=[*quiet, *ends])
    for end in (theirs_in, theirs_out, *high):
        os.close(end)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        for end in (ours_out, ours_in):  # it ends when its pipe does
            os.close(end)
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
