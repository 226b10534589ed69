"""A headless Chromium that looks at a local page, driven through its debugging pipe: no package is needed for it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
)


def find_browser() -> str | None:
    """The program, or None where none is installed."""
    return next((found for name in _NAMES if (found := shutil.which(name)) is not None), None)


#: The browser reads commands from descriptor 3 and answers on 4, where the pipes' own ends may lie.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page in one browser; made by :func:`open_browser`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._waiting = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command of the DevTools protocol; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, event: str) -> None:
        """Waits for an event of this name that has not been seen yet."""
        while not any(seen.get("method") == event for seen in self.events):
            self.events.append(self._receive())

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        """Loads a file in a window of ``width`` by ``height`` CSS pixels."""
        self.events.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        address = page.resolve().as_uri()
        self.send("Page.navigate", url=address)
        # A load event may be that of the page before, which has loaded itself again.
        while not self.evaluate(f"location.href === {json.dumps(address)} && document.readyState === 'complete'"):
            time.sleep(0.02)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def requests(self) -> list[str]:
        """What the page has asked for since it was opened."""
        sent = [seen["params"] for seen in self.events if seen.get("method") == "Network.requestWillBeSent"]
        return [str(parameters["request"]["url"]) for parameters in sent]

    def picture(self, path: Path, *, height: int | None = None, of: str | None = None) -> None:
        """Writes a PNG or WebP, by its ending, of the whole page or of its first ``height`` CSS pixels.

        Args:
            of: An expression for the element that is shown, at most so much of it, in place of the page.
        """
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        top, whole = 0, size["height"]
        if of is not None:
            top, whole = self.evaluate(f"(b => [b.top + scrollY, b.height])(({of}).getBoundingClientRect())")
        shown = whole if height is None else min(height, whole)
        clip = {"x": 0, "y": top, "width": size["width"], "height": shown, "scale": 1}
        kind: dict[str, Any] = {"format": "webp", "quality": 85} if path.suffix == ".webp" else {"format": "png"}
        answer = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True, **kind)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            chunk = os.read(self._from, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._waiting += chunk
        line, _, self._waiting = self._waiting.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.contextmanager
def open_browser(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in ``profile``; it is ended with the block, with all of its processes."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    command = [program, *_OPTIONS, f"--user-data-dir={profile}"]
    program_call = [sys.executable, "-S", "-E", "-c", _LAUNCH, str(in_read), str(out_write), *command]
    process = subprocess.Popen(  # noqa: S603 fixed words
        program_call,
        pass_fds=(in_read, out_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Browser(in_write, out_read)
    finally:
        os.close(in_write)
        os.close(out_read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
