"""Makes the pictures in docs/pictures: trains the two smoke recipes and looks at their reports in Chromium.

    python docs/tools/report_pictures.py

takes a few minutes on two cores and needs `chromium` (or Chrome) on the PATH.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from browser import Browser, find_browser, open_browser

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
#: Where the running report is looked at.
_SOME_STEP = "held-out"
_SECONDS_TO_WAIT = 300


def start(command: str, recipe: str, folder: Path, *settings: str) -> subprocess.Popen[bytes]:
    """Starts a run in ``folder``."""
    words = [sys.executable, "-m", "ftcli", command, str(ROOT / "recipes" / recipe), "--output-dir", str(folder)]
    options = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen([*words, *options, "--offline", "--quiet"])  # noqa: S603 fixed words


def look_while_running(browser: Browser, run: Path) -> None:
    """Takes a picture of the report once there are held-out results."""
    page = run / "report.html"
    until = time.monotonic() + _SECONDS_TO_WAIT
    while not (page.is_file() and _SOME_STEP in page.read_text(encoding="utf-8")):
        if time.monotonic() > until:
            raise SystemExit(f"{page} shows no held-out results after {_SECONDS_TO_WAIT} seconds")
        time.sleep(0.5)
    browser.open(page, width=1000)
    browser.picture(PICTURES / "report-live.webp", height=760)


def main() -> None:
    """Writes all pictures."""
    program = find_browser()
    if program is None:
        raise SystemExit("no Chromium or Chrome is installed")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, open_browser(program, Path(temporary) / "profile") as browser:
        folder = Path(temporary)
        supervised = start("train", "smoke.yaml", folder / "smoke", "eval.every_steps=20", "eval.samples=8")
        look_while_running(browser, folder / "smoke")
        if supervised.wait() != 0:
            raise SystemExit("ftcli train has failed")
        if start("grpo", "smoke-grpo.yaml", folder / "smoke-grpo", "eval.every_steps=10").wait() != 0:
            raise SystemExit("ftcli grpo has failed")
        browser.open(folder / "smoke" / "report.html", width=1100)
        browser.picture(PICTURES / "report.webp", height=1500)
        browser.open(folder / "smoke" / "report.html", width=420)
        browser.picture(PICTURES / "report-narrow.webp", height=1500)
        browser.open(folder / "smoke-grpo" / "report.html", width=1100, dark=True)
        browser.picture(PICTURES / "report-grpo-dark.webp", height=1400)


if __name__ == "__main__":
    main()
