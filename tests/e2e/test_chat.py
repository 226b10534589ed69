"""`ftcli chat`: one answer for scripts, and a talk."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.cli.app import main
from ftcli.cli.commands.chat import talk
from ftcli.cli.options import load_run
from ftcli.cli.render import Style, document, terminal_text
from ftcli.pipeline.chatting import Chat, ChatOptions, open_chat
from ftcli.reporting import Session, SilentReporter
from tests.e2e.conftest import NARROW, RECIPE, User, merged

ASKED = "mirror: kano"


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recipe whose run is there, trained far enough to answer differently than its base."""
    folder = tmp_path_factory.mktemp("chat")
    change = {
        "run": {"output_dir": str(folder / "run")},
        "train": {"max_steps": 8, "learning_rate": 1e-2},
        "checkpoint": {"every_steps": 4},
        "eval": {"generate": {"max_new_tokens": 6}},
    }
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(merged({**RECIPE, "model": NARROW}, change)))
    assert main(["train", str(path), "--offline", "--quiet"]) == 0
    return str(path)


@pytest.fixture
def run(recipe: str) -> str:
    return str(Path(recipe).parent / "run")


def test_one_answer_as_json(user: User, recipe: str, run: str) -> None:
    answer = user.done("chat", run, "--prompt", ASKED)
    assert {"completion", "stop", "prompt_tokens", "completion_tokens", "seconds", "model", "base", "run"} <= set(
        answer
    )
    assert answer["stop"] in ("stop", "max_new_tokens")
    assert 0 < answer["completion_tokens"] <= 6
    assert (answer["temperature"], answer["seed"], answer["base"]) == (0.0, None, False)
    assert user.done("chat", recipe, "--prompt", ASKED)["completion"] == answer["completion"]
    base = user.done("chat", run, "--prompt", ASKED, "--base")
    assert base["base"]
    assert base["completion"] != answer["completion"]
    halfway = user.done("chat", run, "--prompt", ASKED, "--checkpoint", "4")
    assert halfway["checkpoint"].endswith("step-00000004")


def test_the_answer_is_that_of_evaluation(user: User, run: str) -> None:
    task = [
        "--set",
        "eval.tasks=[{use: contains, max_rows: 1}]",
        "--set",
        "data.eval=[{path: bundled:smoke-eval, max_rows: 2}]",
    ]
    scored = user.done("eval", f"{run}/recipe.yaml", "--run", run, *task)
    (sample,) = scored["run"]["tasks"]["contains"]["samples"]
    row = json.loads(Path("ftcli/assets/data/smoke-eval.jsonl").read_text().splitlines()[0])
    answer = user.done("chat", run, "--prompt", row["messages"][0]["content"])
    assert answer["completion"] == sample["completion"]


def test_sampling_is_by_its_seed(user: User, run: str) -> None:
    words = ["chat", run, "--prompt", ASKED, "--temperature", "3", "--max-new-tokens", "12"]
    said = [user.done(*words, "--seed", seed)["completion"] for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]
    assert user.done(*words)["seed"] == 3  # run.seed


def test_stdin_is_answered_once(user: User, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = user.done("chat", run, "--prompt", ASKED)["completion"]

    def piped(content: bytes, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        status = main(["chat", run, "--offline", "--quiet", *more])
        return status, *user.capture.readouterr()

    status, out, _ = piped(ASKED.encode() + b"\n")
    assert (status, out) == (0, terminal_text(wanted) + "\n")
    status, _, err = piped(b"")
    assert status == 2
    assert "FT158" in err
    status, _, err = piped(b"caf\xe9")
    assert status == 2
    assert "byte 4" in err


def test_what_cannot_be_answered(user: User, recipe: str, run: str) -> None:
    def code(*words: str) -> tuple[int, str]:
        status, document = user.run("chat", *words)
        return status, document["findings"][-1]["code"]

    assert code(run, "--prompt", " ") == (2, "FT158")
    assert code(run, "--prompt", ASKED, "--base", "--checkpoint", "4") == (2, "FT158")
    assert code(run, "--prompt", ASKED, "--raw", "--system", "Be brief.") == (2, "FT158")
    assert code(run, "--prompt", ASKED, "--temperature", "-1") == (2, "FT150")
    assert code(run, "--prompt", ASKED, "--checkpoint", "99") == (2, "FT725")
    assert code(run, "--prompt", "long " * 200) == (4, "FT431")
    assert code(run, "--prompt", ASKED, "--system", "Be brief.") == (4, "FT425")
    assert code(run, "--prompt", "half \ud83d") == (4, "FT412")
    assert code(str(user.folder), "--prompt", ASKED) == (2, "FT154")
    untrained = user.recipe()
    assert code(untrained, "--prompt", ASKED) == (2, "FT763")
    assert user.done("chat", untrained, "--prompt", ASKED, "--base")["run"] is None


def test_an_adapter_stays_with_its_base(user: User, run: str) -> None:
    status, document = user.run("chat", run, "--prompt", ASKED, "--set", "run.seed=4")  # of other random weights
    assert (status, document["findings"][-1]["code"]) == (2, "FT735")
    other = ("--set", "model.name_or_path=bundled:tiny-gemma2", "--set", "model.init=pretrained")
    status, document = user.run("chat", run, "--prompt", ASKED, *other)
    assert (status, document["findings"][-1]["code"]) == (2, "FT735")


def test_the_template_of_training_is_used(user: User, run: str) -> None:
    wanted = user.done("chat", run, "--prompt", ASKED)
    status, document = user.run("chat", run, "--prompt", ASKED, "--set", "data.chat_template=chatml")
    assert status == 0
    assert "FT734" in [finding["code"] for finding in document["findings"]]
    assert document["result"]["completion"] == wanted["completion"]


@pytest.fixture(scope="module")
def opened(recipe: str) -> Callable[..., Chat]:
    def make(*sets: str, **options: Any) -> Chat:
        from ftcli.config.load import Override

        loaded, folder = load_run(recipe, [Override(text, f"--set {text}") for text in sets])
        return open_chat(loaded, Session(offline=True), folder, ChatOptions(**options))

    return make


class Told(SilentReporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)


def spoken(chat: Chat, *lines: str) -> tuple[str, list[str]]:
    """What a person sees who types these lines, and then Ctrl-D."""
    waiting: Iterator[str] = iter(lines)

    def read() -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    out, told = io.StringIO(), Told()
    talk(chat, told, out, Style(color=False), read)
    return out.getvalue(), told.lines


def test_a_talk_keeps_its_history_until_reset(opened: Callable[..., Chat], capsys: pytest.CaptureFixture[str]) -> None:
    chat = opened("data.max_seq_len=128", temperature=0.0, max_new_tokens=5)
    shown, told = spoken(chat, ASKED, "mirror: tomu")
    assert told[0].endswith("greedy, at most 5 new tokens an answer")
    roles = [turn["role"] for turn in chat.conversation.turns]
    assert roles == ["user", "assistant", "user", "assistant"]
    said = [str(turn["content"]) for turn in chat.conversation.turns]
    assert [terminal_text(said[1]), terminal_text(said[3])] == re.split(r"\n(?!$)", shown.removesuffix("\n\n"))[:2]
    question = chat.conversation.question("third")
    assert question.text.index(ASKED) < question.text.index("tomu") < question.text.index("third")
    before = len(chat.conversation.turns)
    spoken(chat, "far too long " * 80)
    assert "FT431" in capsys.readouterr().err
    assert len(chat.conversation.turns) == before
    _, told = spoken(chat, "/reset", "/what")
    assert told[2] == "a new conversation"
    assert "/exit" in told[3]
    assert chat.conversation.turns == ()
    assert spoken(chat, "/exit", ASKED)[0] == ""


def test_ctrl_c_stops_an_answer_and_a_second_one_ends(opened: Callable[..., Chat]) -> None:
    chat = opened("data.max_seq_len=128", max_new_tokens=60, temperature=5.0, seed=1)

    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            if text.strip():
                raise KeyboardInterrupt
            return super().write(text)

    waiting = iter([ASKED])

    def read() -> str:
        for line in waiting:
            return line
        raise KeyboardInterrupt

    told = Told()
    with pytest.raises(KeyboardInterrupt):
        talk(chat, told, Impatient(), Style(color=False), read)
    assert told.lines[-1] == "(stopped)"
    assert [turn["role"] for turn in chat.conversation.turns] == ["user", "assistant"]
    assert len(str(chat.conversation.turns[1]["content"])) < 60


def test_reasoning_that_the_prompt_began_is_whole_in_the_history(opened: Callable[..., Chat]) -> None:
    chat = opened("data.max_seq_len=256")
    question = chat.conversation.question("why?")
    for reasoning in ("because</think>so", "because"):
        thoughtful = type(question)("why?", f"{question.text}<think>\n", question.tokens)
        chat.conversation.reset()
        chat.conversation.answered(thoughtful, reasoning)
        content = str(chat.conversation.turns[1]["content"])
        assert content.startswith("<think>\nbecause")
        assert content.count("</think>") == 1


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    assert terminal_text("a\x1b[31mb\rc\x9b2J\u202ed") == "a\\x1b[31mb\\rc\\x9b2J\\u202ed"
    kept = "line\n\ttab 👩‍👩‍👧 Grüße 世界 می‌خواهم"
    assert terminal_text(kept) == kept


def test_documents_do_not_either_and_say_the_same() -> None:
    text = "a\x1b[31m \x7f \x9b2J \u202e \U000e0041 \n\t Grüße 👩‍👩‍👧"
    written = document("chat", 0, (), {"completion": text})
    assert not set("\x1b\x7f\x9b\u202e\U000e0041") & set(written)
    assert "Grüße 👩‍👩‍👧" in written
    assert json.loads(written)["result"]["completion"] == text


def test_a_full_fine_tune_answers_for_itself(user: User) -> None:
    recipe = user.recipe(lora=None, train={"max_steps": 4, "learning_rate": 1e-2})
    user.done("train", recipe)
    tuned, base = (user.done("chat", recipe, "--prompt", ASKED, *more) for more in ((), ("--base",)))
    assert (tuned["run"], tuned["base"], base["base"]) == (str(user.folder / "r"), False, True)
    assert tuned["completion"] != base["completion"]


@pytest.mark.parametrize("answer", ["", " \n", "  kano  ", "/exit", "<end_of_turn>", "two\n\nlines"])
def test_whatever_was_answered_the_next_turn_can_be_asked(opened: Callable[..., Chat], answer: str) -> None:
    conversation = opened("data.max_seq_len=256", prompt=ASKED).conversation
    conversation.answered(conversation.question(ASKED), answer)
    assert answer.strip() in conversation.question("and now?").text


def test_a_turn_of_which_nothing_came_is_forgotten(opened: Callable[..., Chat]) -> None:
    chat = opened(prompt=ASKED)
    pieces = chat.ask(ASKED)
    pieces.close()
    assert chat.conversation.turns == ()
