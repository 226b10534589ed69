"""For programs: documents fit the schemas that are published, and the tools of `ftcli mcp` are those commands."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ftcli.cli.app import build_app, main
from ftcli.cli.commands.schema import RESULTS, published
from tests.e2e.conftest import User


def held(command: str, document: dict[str, Any]) -> None:
    schema = published(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)


def test_documents_of_a_run_fit_their_schemas(user: User) -> None:
    recipe = user.recipe("r", export={"formats": ["adapter"]}, eval={"every_steps": 3, "samples": 1})
    held("check", user.run("check", recipe)[1])
    held("check", user.run("check", recipe, "--as", "all", "--price", "1")[1])
    held("train", user.run("train", recipe)[1])
    held("train", user.run("train", recipe)[1])  # complete already
    held("eval", user.run("eval", recipe, "--run", str(user.folder / "r"))[1])
    held("export", user.run("export", str(user.folder / "r"))[1])
    held("chat", user.run("chat", recipe, "--prompt", "hi", "--base")[1])
    for words in (["runs", str(user.folder)], ["compare", str(user.folder / "r"), str(user.folder / "r")], ["doctor"]):
        user.capture.readouterr()
        main([*words, "--json"])
        held(words[0], json.loads(user.capture.readouterr().out))


@pytest.mark.parametrize(
    "words", [["check", "none.yaml"], ["train", "none.yaml"], ["recipes", "show", "none"], ["recipes", "list"]]
)
def test_documents_of_failures_fit_too(words: list[str], user: User) -> None:
    user.capture.readouterr()
    main([*words, "--json"])
    held(" ".join(words[:2]) if words[0] == "recipes" else words[0], json.loads(user.capture.readouterr().out))


def test_a_document_that_lacks_a_key_is_noticed(user: User) -> None:
    _, document = user.run("train", user.recipe("r", train={"max_steps": 1}))
    held("train", document)
    del document["result"]["seconds"]
    with pytest.raises(jsonschema.ValidationError):
        held("train", document)


def test_every_command_that_answers_has_a_schema(user: User) -> None:
    import typer

    commands = set(typer.main.get_command(build_app()).commands) - {"recipes", "schema", "mcp"}
    assert commands <= set(RESULTS)
    user.capture.readouterr()
    assert main(["schema"]) == 0
    assert set(json.loads(user.capture.readouterr().out)["commands"]) == set(RESULTS)
    assert main(["schema", "recipes", "new"]) == 0
    assert json.loads(user.capture.readouterr().out) == published("recipes new")
    assert main(["schema", "nothing"]) == 2


async def _with_tools(words: list[str], folder: Path, use: Any) -> Any:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = StdioServerParameters(command=sys.executable, args=["-m", "ftcli", *words], cwd=folder, env=environment)
    with Path(os.devnull).open("w") as unseen:
        async with Client(stdio_client(server, errlog=unseen)) as client:
            return await use(client)


def tools(words: list[str], folder: Path, use: Any) -> Any:
    return asyncio.run(_with_tools(words, folder, use))


def answer(result: Any) -> dict[str, Any]:
    found: dict[str, Any] = result.structured_content or json.loads(result.content[0].text)
    return found


@pytest.mark.slow
def test_an_agent_checks_a_recipe_and_changes_nothing(user: User) -> None:
    user.recipe("r")
    before = sorted(path.name for path in user.folder.iterdir())

    async def use(client: Any) -> Any:
        offered = await client.list_tools()
        names = {tool.name: tool.annotations.read_only_hint for tool in offered.tools}
        good = await client.call_tool("check", {"recipe": "r.yaml", "gpu": "h100"})
        bad = await client.call_tool("check", {"recipe": "r.yaml", "settings": ["lora.rank=3"]})
        odd = await client.call_tool("check", {"recipe": "--help"})
        return names, answer(good), answer(bad), answer(odd)

    names, good, bad, odd = tools(["mcp", "--offline"], user.folder, use)
    assert set(names) == {"check", "doctor", "recipes", "recipe", "recipe_schema", "answer_schema", "runs", "compare"}
    assert all(names.values())
    assert (good["ok"], bad["ok"], bad["exit_code"], odd["ok"]) == (True, False, 2, False)
    held("check", good)
    assert sorted(path.name for path in user.folder.iterdir()) == before


@pytest.mark.slow
@pytest.mark.long
def test_an_agent_starts_and_stops_a_run_that_goes_on(user: User) -> None:
    recipe = user.recipe("r", train={"max_steps": 100_000, "warmup_steps": 0})
    run = user.folder / "r"

    async def use(client: Any) -> Any:
        started = answer(await client.call_tool("start", {"recipe": Path(recipe).name}))
        for _ in range(600):
            if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
                break
            await asyncio.sleep(0.2)
        stopped = answer(await client.call_tool("stop", {"run": "r"}))
        refused = answer(await client.call_tool("start", {"recipe": "none.yaml"}))
        return started, stopped, refused

    started, stopped, refused = tools(["mcp", "--offline", "--allow-runs"], user.folder, use)
    assert started["ok"]
    assert stopped == {"ok": True, "pid": started["pid"]}
    assert refused["exit_code"] == 2
    for _ in range(300):
        status = json.loads((run / "status.json").read_text())
        if status["state"] != "running":
            break
        time.sleep(0.2)
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert list((run / "checkpoints").glob("step-*"))
