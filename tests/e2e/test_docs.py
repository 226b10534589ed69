"""The commands of pages in docs/ do what the page says, in order, in an empty folder; those of all pages are commands.

Blocks marked ``run`` or ``exit=N`` are run. Every other command line, in blocks and within sentences, is read by the
real parser, its recipe with its settings by the real loader, and the files of the repository that it names are there:
what it would do after that needs a GPU, the network, or hours.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from ftcli.cli import options
from ftcli.cli.app import build_app
from ftcli.cli.commands.recipes import find
from ftcli.cli.options import Invocation
from ftcli.config.load import load_recipe
from ftcli.config.schema import RecipeSchema
from ftcli.facts.device import named_device
from ftcli.tables import exports
from tests.e2e.drill import Server

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: Each page, how many blocks it has at least, and a file that it leaves.
PAGES = [
    ("quickstart", 8, "runs/my-first/report.html"),
    pytest.param("install", 1, "runs/smoke/export/safetensors/model.safetensors", marks=pytest.mark.long),
    pytest.param("migrating", 10, "outputs/mine/export/safetensors/model.safetensors", marks=pytest.mark.long),
    pytest.param("sweeps", 2, "runs/rates/comparison.html", marks=pytest.mark.long),
    pytest.param("evaluation", 5, "runs/watched/eval.json", marks=pytest.mark.long),
    pytest.param("chat", 3, "answer.json", marks=pytest.mark.long),
    pytest.param("agents", 2, "runs/mine/export/safetensors/model.safetensors", marks=pytest.mark.long),
    pytest.param("troubleshooting", 10, "runs/trial.previous-1/report.html", marks=pytest.mark.long),
]
BLOCK = re.compile(r"^```(\w+) (run|exit=\d+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "count", "left"), PAGES)
def test_a_page_runs(
    page: str, count: int, left: str, shell: dict[str, str], drill_server: Server, tmp_path: Path
) -> None:
    if page == "sweeps":  # whose runs are processes of their own, and know of no narrow model
        prepared = [each for each in json.loads(shell["DRILL_PREPARATIONS"]) if each[0] != "bundled_models"]
        shell = {**shell, "DRILL_PREPARATIONS": json.dumps(prepared)}
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(DOCS / "preemptible.sh", folder)
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert len(blocks) >= count
    for language, expected, text in blocks:
        status = 0 if expected == "run" else int(expected.removeprefix("exit="))
        if language == "python":
            script = tmp_path / "block.py"
            script.write_text(text, encoding="utf-8")
            ran = drill_server.start(cwd=folder, script=script)
            assert ran.wait() == status, f"{text}\n{ran.said}"
            continue
        command = ["bash", "-e", "-c", text]
        done = subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == status, f"{text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
    assert (folder / left).exists()


TEXTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "kernels").glob("*.md"))]
#: What stands in the place of a value: such a line in a sentence says the form of a command, and is not read.
FORM = re.compile(r"…|\.\.\.| / |[\[<|{]|(?<![\w./=-])[A-Z][A-Z_0-9]*(?![\w./=-])|=[A-Z][A-Z_0-9]*(,|$| )")
_PROMPT = re.compile(r"^(\$ |> )?((sudo|nohup|time|exec|srun|timeout \S+) |[A-Z_]+=\S* )*")


def commands_of(text: str) -> Iterator[tuple[str, bool]]:
    """Each command line of a page, and whether it stands in a sentence, where it may be a form only."""
    fenced = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if not language.startswith(("python", "json", "yaml"))]
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^ {4}.*\n)+", rest + "\n", re.MULTILINE)
    blocks += [text for text in indented if re.match(r" {4}(ftcli|python|make|bash) ", text)]  # no wrapped sentence
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s(?:&&|\|\||\||;)\s|;\s", line.strip()):
                yield _PROMPT.sub("", part.split(" # ")[0].split("   #")[0].strip()), False
    for code in re.findall(r"`([^`]+)`", re.sub(r"^ {4}.*$", "", rest, flags=re.MULTILINE)):
        yield _PROMPT.sub("", " ".join(code.split())), True


def words_of(line: str) -> list[str]:
    """A command line's words, without what the shell takes for itself."""
    words = [word for word in shlex.split(line, comments=True) if word != "&"]
    ends = [number for number, word in enumerate(words) if re.match(r"^\d?[<>]|^&>", word)]
    return words[1 : min(ends, default=len(words))]


@cache
def _commands() -> frozenset[str]:
    return frozenset(typer.main.get_command(build_app(None)).commands)


def wrong_with(words: list[str]) -> str:
    """Why a command line of ours cannot be run; empty where it can."""
    if words[:1] == ["--version"]:
        return ""
    if words and not words[0].startswith("-") and words[0] not in _commands():
        return f"no command {words[0]}"
    try:
        made = typer.main.get_command(build_app(words[0] if words else None)).main(args=words, standalone_mode=False)
    except typer.exceptions.TyperException as error:
        return f"{type(error).__name__}: {error}"
    except SystemExit as end:  # what installs completion for a shell
        return "" if end.code == 0 else f"it ends with {end.code}"
    if "--help" in words or len(words) < 2:
        return ""
    return "" if isinstance(made, Invocation) else "it is not read as a command"


def values_of(words: list[str], *names: str) -> list[str]:
    """The values of an option, however it is written."""
    joined = [word.partition("=")[2] for word in words if word.startswith(tuple(f"{name}=" for name in names))]
    return [after for word, after in pairwise(words) if word in names] + joined


def refused_by_recipe(words: list[str]) -> str:
    """Why the recipe with its settings is none, or the settings none of any recipe; empty where all is well."""
    sets = values_of(words, "--set")
    for name in values_of(words, "--as"):
        if name != "all":
            named_device(name)
    unknown = [name for name in values_of(words, "--format") if name not in exports.names()]
    if words[:2] in (["recipes", "show"], ["recipes", "copy"]):
        find(words[2])
    keys = set(RecipeSchema().keys())
    leaves = keys - {key.rpartition(".")[0] for key in keys}  # below which a map's keys are the user's
    for key in (text.partition("=")[0] for text in sets):
        if key not in keys and not any(key.startswith(f"{leaf}.") for leaf in leaves):
            unknown.append(key)
    file = next((word for word in words[1:2] if word.endswith(".yaml")), None)
    there = [] if file is None else [path for path in (ROOT / file, ROOT / "recipes" / file) if path.is_file()]
    if there and not unknown and words[0] != "sweep":
        load_recipe(there[0], options.overrides(sets))
    if file is not None and file.startswith("recipes/") and not there:
        unknown.append(file)
    return ", ".join(unknown)


def wrong_in(line: str, *, in_sentence: bool) -> str:
    """What is wrong with a line of a page; empty where nothing is, or it is no command of ours."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    if in_sentence and FORM.search(line):
        return ""
    missing = [name for name in files_named(line) if not (ROOT / name).exists()]
    if re.match(r"make \w", line):
        missing += [word for word in line.split()[1:] if "=" not in word and word not in targets]
    if missing or not re.match(r"ftcli( |$)", line):
        return f"there is no {missing[0]}" if missing else ""
    words = words_of(line)
    why = wrong_with(words) if words else ""
    if in_sentence and re.search("Missing|requires an argument|not read", why):
        return ""  # as in "see `ftcli compare --html`"
    return why or refused_by_recipe(words)


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem)
def test_every_command_of_a_page_is_one(page: Path) -> None:
    lines = commands_of(page.read_text(encoding="utf-8"))
    wrong = [f"{line}: {why}" for line, sentence in lines if (why := wrong_in(line, in_sentence=sentence))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "ftcli trian recipes/smoke.yaml",
        "ftcli train recipes/smoke.yaml --max-step 3",
        "ftcli train",
        "ftcli train recipes/none.yaml",
        "ftcli train mine.yaml --set train.rate=1",
        "ftcli export runs/smoke --format ggml",
        "python docs/tools/none.py",
        "make nothing",
    ],
)
def test_a_line_that_is_no_command_is_found(line: str) -> None:
    ((found, _),) = (each for each in commands_of(f"```console\n$ CUDA_VISIBLE_DEVICES=0 {line}  # so\n```") if each[0])
    assert found == line
    assert wrong_in(found, in_sentence=False)


def files_named(line: str) -> list[str]:
    """Files of the repository that a command line names."""
    program = line.split(" ", 1)[0].rpartition("/")[2]
    if program not in ("python", "bash", "sh", "pytest", "torchrun"):
        return []
    return [word for word in line.split() if re.match(r"(docs|kernels|tests|recipes)/[\w./-]+\.(py|sh|yaml)$", word)]


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Links of a page to files or headings of the repository that are not there."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" in link or (target.exists() and (not anchor or anchor in anchors_of(target))):
            continue
        dead.append(link)
    return dead


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` page\n[1](#a-b-page) [2](page.md#a-b-page) [3](#none) [4](none.md) [5](https://x.y/#z)\n")
    assert dead_links(page) == ["#none", "none.md"]
