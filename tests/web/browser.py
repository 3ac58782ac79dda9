"""A real browser for tests: Chromium, which takes commands through a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing but the page itself: no looking for updates, no talking to anybody.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 60.0


class Browser:
    """One tab."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._commands, self._answers = commands, answers
        self._sent = 0
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, self._session, **params)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} does not come true; {self.complaints}"
            time.sleep(0.05)

    def screenshot(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        self._commands.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            raw += byte
        return json.loads(raw)

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what a page complains about: failing scripts, what its policy refused."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(event["params"]["exceptionDetails"]["text"])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(event["params"]["entry"]["text"])


@contextlib.contextmanager
def browser(folder: pathlib.Path, width: int = 1300, height: int = 1500) -> Iterator[Browser]:
    """Give a tab of a new Chromium; skip where there is none that starts."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed")
    (read_end, commands), (answers, write_end) = os.pipe(), os.pipe()

    # Chromium reads from descriptor 3 and writes to 4; a shell puts them there.
    redirect = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'
    arguments = [*_FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
    with (
        subprocess.Popen(
            ["/bin/bash", "-c", redirect, program, *arguments],
            pass_fds=(read_end, write_end),
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        ) as process,
        os.fdopen(commands, "wb", buffering=0) as to_browser,
        os.fdopen(answers, "rb") as from_browser,
    ):
        os.close(read_end)
        os.close(write_end)
        try:
            try:
                tab = Browser(to_browser, from_browser)
            except (AssertionError, OSError) as error:
                pytest.skip(f"{program} does not start here: {error}")
            yield tab
            tab._call("Browser.close")
            process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
