"""Makes the pictures in docs/pictures: trains smoke recipes and looks at their reports in Chromium.

    python docs/tools/report_pictures.py

takes a few minutes on two cores and needs `chromium` (or Chrome) on the PATH.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from browser import Browser, find_browser, open_browser

from ftcli.assets import asset

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
#: Where the running report is looked at.
_SOME_STEP = "held-out"
_SECONDS_TO_WAIT = 300


def start(command: str, recipe: str, folder: Path, *settings: str) -> subprocess.Popen[bytes]:
    """Starts a run in ``folder``, beside which its data may lie."""
    words = [sys.executable, "-m", "ftcli", command, str(ROOT / "recipes" / recipe), "--output-dir", str(folder)]
    options = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen([*words, *options, "--offline", "--quiet"], cwd=folder.parent)  # noqa: S603 fixed words


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


def section(title: str) -> str:
    """The section of a report with this title, as an expression."""
    return f"[...document.querySelectorAll('section')].find(s => s.querySelector('h2').innerText === '{title}')"


def of_training(browser: Browser, folder: Path) -> None:
    """Pictures of a supervised run, while it goes on and after."""
    run = folder / "smoke"
    process = start("train", "smoke.yaml", run, "eval.every_steps=20", "eval.samples=8")
    look_while_running(browser, run)
    if process.wait() != 0:
        raise SystemExit("ftcli train has failed")
    browser.open(run / "report.html", width=1100)
    browser.picture(PICTURES / "report.webp", height=1500)
    browser.open(run / "report.html", width=420)
    browser.picture(PICTURES / "report-narrow.webp", height=1500)


def of_grpo(browser: Browser, folder: Path) -> None:
    """Pictures of a run that learns from rewards, and of one whose rewards were shuffled."""
    run, control = folder / "smoke-grpo", folder / "shuffled"
    for name, settings in ((run, ()), (control, ("grpo.shuffle_rewards=true",))):
        if start("grpo", "smoke-grpo.yaml", name, "eval.every_steps=10", *settings).wait() != 0:
            raise SystemExit("ftcli grpo has failed")
    browser.open(run / "report.html", width=1100, dark=True)
    browser.picture(PICTURES / "report-grpo-dark.webp", height=1400)
    browser.open(run / "report.html", width=1100)
    browser.picture(PICTURES / "grpo-curves.webp", of=section("Curves"))
    browser.picture(PICTURES / "grpo-completions.webp", of=section("Completions in training"))
    browser.open(control / "report.html", width=1100)
    browser.picture(PICTURES / "grpo-shuffled.webp", of=section("Curves"), height=362)


def write_pairs(name: str, path: Path) -> Path:
    """Pairs from bundled rows: the answer is chosen, and rejected with its end cut off or some letters of it twice."""
    pairs = []
    for number, line in enumerate(asset("data", f"{name}.jsonl").read_text(encoding="utf-8").splitlines()):
        asked, answered = json.loads(line)["messages"]
        text, size = answered["content"], 1 + number // 2 % 5
        wrong = text[:-size] if number % 2 else text[:size] + text
        pairs.append({"prompt": [asked], "chosen": [answered], "rejected": [{**answered, "content": wrong}]})
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return path


def of_pairs(browser: Browser, folder: Path) -> None:
    """The picture of a run on pairs that has not learned all of them yet."""
    train, held_out = (write_pairs(name, folder / f"{name}.jsonl") for name in ("smoke-train", "smoke-eval"))
    settings = (f"data.train=[{train.name}]", f"data.eval=[{held_out.name}]", "eval.every_steps=20", "eval.samples=0")
    if start("train", "smoke-dpo.yaml", folder / "dpo", *settings, "train.max_steps=40").wait() != 0:
        raise SystemExit("ftcli train has failed")
    browser.open(folder / "dpo" / "report.html", width=1100)
    browser.picture(PICTURES / "report-pairs.webp", of=section("Held-out pairs"), height=960)


def of_betas(browser: Browser, folder: Path) -> None:
    """Pictures of a sweep over beta, and of one of its runs."""
    settings = (
        "preference.beta=0.03,0.1,0.3,1",
        f"preference.reference_cache={folder}/reference",
        "train.max_steps=40",
    )
    if start("sweep", "smoke-dpo.yaml", folder / "betas", *settings).wait() != 0:
        raise SystemExit("ftcli sweep has failed")
    browser.open(folder / "betas" / "preference.beta=0.1" / "report.html", width=1100)
    browser.picture(PICTURES / "curves-pairs.webp", of=section("Curves"), height=735)
    browser.open(folder / "betas" / "comparison.html", width=1100)
    browser.picture(PICTURES / "compare-betas.webp", of=section("Curves"))


def main() -> None:
    """Writes all pictures, or those of one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("train", "grpo", "pairs", "betas"))
    only = parser.parse_args().only
    program = find_browser()
    if program is None:
        raise SystemExit("no Chromium or Chrome is installed")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, open_browser(program, Path(temporary) / "profile") as browser:
        for name, make in (("train", of_training), ("grpo", of_grpo), ("pairs", of_pairs), ("betas", of_betas)):
            if only in (None, name):
                make(browser, Path(temporary))


if __name__ == "__main__":
    main()
