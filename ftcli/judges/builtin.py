"""Judges that need no code of the user's. Completions are untrusted text.

They are compared, and not run but by `python_tests`, in contained processes; `math_verify` works in processes that are
killed when they are late.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.evaluation import JudgeConfig, RewardConfig
from ftcli.errors import Finding, FtcliError, first_line
from ftcli.facts.device import usable_cores
from ftcli.judges.endpoint import JudgeAccess
from ftcli.judges.process import FunctionSource, Worker, ask_each
from ftcli.judges.verdicts import CompletionBatch, FailedJudgement, Scorer, Verdict
from ftcli.paths import exists, expanded, is_file
from ftcli.plain import JsonObject
from ftcli.tables import code_of, judges
from ftcli.time_limit import TookTooLong, limited_time

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


#: An expression sees only this much of a completion, so that a slow one cannot hold up training.
MAX_MATCHED_CHARS = 20_000
#: And is given up after so long; so are parsing and validation of JSON.
SECONDS = 1.0


class Pattern:
    """A regular expression that a reward or a task names. Raises re.error where it is none."""

    def __init__(self, expression: str) -> None:
        self._compiled = re.compile(expression, re.DOTALL)

    def search(self, text: str) -> re.Match[str] | None:
        """The first match anywhere in the first 20,000 characters; ``.`` matches line breaks too.

        Raises TookTooLong after a second, where this is the main thread: only there a signal can end a search.
        """
        with limited_time(SECONDS):
            return self._compiled.search(text[:MAX_MATCHED_CHARS])


def built_in(config: JudgeConfig, name: str, access: JudgeAccess) -> Callable[[CompletionBatch], list[Verdict]]:
    """The judge ``name`` with the options that a reward or a task gives it."""
    row = judges.row(name)
    options = {key: getattr(config, key, None) for key in row.options} | ({"access": access} if row.remote else {})
    made = code_of(row.code)(**{key: value for key, value in options.items() if value is not None})
    if row.model:
        of_batch: Callable[[CompletionBatch], list[Verdict]] = made
        return of_batch
    scorer: Scorer = made
    return lambda batch: scorer(batch.completions, batch.answers)


def missing_answer(reward: RewardConfig, columns: Collection[str]) -> Finding | None:
    """FT453 for a built-in reward that compares with a column of the data, where the data does not have it."""
    if reward.use is None or not judges.row(reward.use).compares or reward.answer in columns:
        return None
    message = f"the reward {reward.use} compares with column {reward.answer!r}, which the data does not have"
    help = f"set the reward's `answer` to one of: {', '.join(sorted(columns)) or 'none'}"
    return Finding("FT453", message, help=help)


def _each(one: Callable[[str, str], Verdict]) -> Scorer:
    """Scores completions one by one, each with its answer, "" where there is none."""
    return lambda completions, answers: [one(*pair) for pair in zip_longest(completions, answers, fillvalue="")]


def exact_match(extract: str | None = None) -> Scorer:
    """Passes where a completion is the answer, surrounding space aside.

    With ``extract``, a regular expression, only its first group is compared (all that matches, where it has no group).
    """
    expression = Pattern(extract) if extract is not None else None
    return _each(lambda text, answer: _matches(text, answer, expression))


def contains() -> Scorer:
    """Passes where the answer, without surrounding space, is somewhere in the completion."""
    return _each(lambda text, answer: float(answer.strip() in text))


def regex(pattern: str) -> Scorer:
    """Passes where ``pattern`` is found (:meth:`ftcli.judges.builtin.Pattern.search`)."""
    expression = Pattern(pattern)
    return _each(lambda text, _: _found(text, expression))


def length(max_chars: int, min_chars: int = 0) -> Scorer:
    """Passes for at least ``min_chars`` and at most ``max_chars`` characters, surrounding space aside."""
    return _each(lambda text, _: float(min_chars <= len(text.strip()) <= max_chars))


_GIVEN_UP = FailedJudgement(f"has an expression that was given up after {SECONDS:g} s")


def _found(text: str, expression: Pattern) -> Verdict:
    try:
        return float(expression.search(text) is not None)
    except TookTooLong:
        return _GIVEN_UP


def _matches(text: str, answer: str, expression: Pattern | None) -> Verdict:
    if expression is not None:
        try:
            text = _extracted(expression, text)
        except TookTooLong:
            return _GIVEN_UP
    return float(text.strip() == answer.strip())


def _extracted(expression: Pattern, text: str) -> str:
    found = expression.search(text)
    if found is None:
        return ""
    return (found.group(1) if found.groups() else found.group(0)) or ""  # a group may take no part in the match


#: Lists and maps in each other; a deeper value does not pass. Python's own limit depends on who calls.
MAX_DEPTH = 100
#: Of :func:`jsonschema.validators.validator_for`, which has no typed way to say that there is none.
_NONE: Any = None
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class NoSchema(Exception):
    """A JSON Schema that cannot be used; the message says why."""


def json_valid(json_schema: str | JsonObject | None = None) -> Scorer:
    """Passes for one JSON value and nothing else, at most 100 levels deep; NaN and Infinity are not JSON.

    With ``json_schema``, a map or the path of a file, the value must fit it as well.

    Raises FtcliError (exit 2): FT280 for a schema that cannot be used.
    """
    try:
        validator = None if json_schema is None else validator_of(json_schema)
    except NoSchema as error:
        help = "correct the schema; what a `$ref` names has to be under its own `$defs`"
        raise FtcliError.single("FT280", f"json_schema {error}", help=help) from error
    return _each(lambda text, _: _fits(text, validator))


def validator_of(json_schema: str | JsonObject) -> Validator:
    """A validator of values against a schema of any draft (2020-12 if it names none).

    References lead to the schema itself or to the drafts' own; nothing is fetched.

    Raises NoSchema: there is no such file; it is no JSON; no schema by its draft; a reference leads elsewhere, or in
    circles.
    """
    from jsonschema import exceptions, validators
    from jsonschema_specifications import REGISTRY
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    schema: Any = _read(json_schema) if isinstance(json_schema, str) else json_schema
    if not isinstance(schema, dict | bool):
        raise NoSchema("is neither a map nor true or false")
    registry: Registry[Any] = REGISTRY
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    kind: Any = validators.Draft202012Validator if draft is None else validators.validator_for(schema, default=_NONE)
    if kind is _NONE:
        raise NoSchema(f"names a draft that is not known: {draft!r}")
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
        specification = DRAFT202012 if draft is None else specification_with(str(draft))
        resource = specification.create_resource(schema)
        resolver = registry.with_resource(resource.id() or "", resource).resolver(resource.id() or "")
        for part, at in _parts(resource, resolver):
            for name in _REFERENCES:
                if isinstance(part, dict) and isinstance(part.get(name), str):
                    at.lookup(part[name])
        validator: Validator = kind(schema, registry=registry)
        for sample in (None, True, 0, "", [0], {"": 0}):
            validator.is_valid(sample)
    except exceptions.SchemaError as error:
        raise NoSchema(f"is not a JSON Schema at {error.json_path}: {first_line(error)}") from error
    except Unresolvable as error:
        raise NoSchema(f"refers to what it does not hold, and nothing is fetched: {first_line(error)}") from error
    except RecursionError as error:
        raise NoSchema("refers to itself without end, or is too deep") from error
    return validator


def _parts(resource: Any, resolver: Any) -> Iterator[tuple[Any, Any]]:
    """Every schema within a schema, with what resolves its references."""
    waiting = [(resource, resolver)]
    while waiting:
        part, at = waiting.pop()
        yield part.contents, at
        waiting += [(below, at.in_subresource(below)) for below in part.subresources()]


def _read(name: str) -> Any:
    path = expanded(name)
    if exists(path) and not is_file(path):  # a pipe would be waited for, and a device read without end
        raise NoSchema(f"is no file at {path.absolute()}")
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise NoSchema(f"cannot be read from {path.absolute()}: {error.strerror or first_line(error)}") from error
    except (ValueError, RecursionError) as error:
        raise NoSchema(f"in {path.absolute()} is not JSON: {first_line(error)}") from error


def _fits(text: str, validator: Validator | None) -> Verdict:
    try:
        with limited_time(SECONDS):
            value = _parsed(text)
            return float(validator is None or bool(validator.is_valid(value)))
    except (ValueError, RecursionError):
        return 0.0
    except TookTooLong:
        return FailedJudgement(f"took more than {SECONDS:g} s")
    except ArithmeticError as error:  # a number beyond every float, where the schema divides
        return FailedJudgement(f"raised {type(error).__name__}: {first_line(error)}")


def _parsed(text: str) -> Any:
    """Raises ValueError where ``text`` is no JSON value, or one that is too deep."""
    value = json.loads(text, parse_constant=_refuse)
    if _depth(value) > MAX_DEPTH:
        raise ValueError("too deep")
    return value


def _refuse(name: str) -> None:
    raise ValueError(name)


def _depth(value: Any) -> int:
    """Depth of lists and maps in each other. Raises RecursionError where it is far beyond what passes."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


#: What a process may take for expressions that grow, and how many there are at most.
_ADDRESS_SPACE, _MOST_WORKERS = 4 * 2**30, 8
_SCRIPT = Path(__file__).with_name("expressions.py")


def math_verify(timeout: float = 5.0) -> Scorer:
    """Passes where an expression that is found in the completion is equal to the answer's, by the package of that name.

    Its own time limit is an alarm that works on a main thread only, does not end code in C, and makes what was not
    compared in time a wrong answer. So it is switched off, and the package works in processes that can be killed.

    What is found is the last LaTeX (``$…$``, ``\\(…\\)``, ``\\boxed{…}``) or plain number; an answer without such marks
    is LaTeX as a whole. An answer without an expression, and a completion that takes longer than ``timeout`` seconds,
    is a failure.
    """
    return _MathVerify(timeout)


class _MathVerify:
    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._workers: list[Worker] = []

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        wanted = min(usable_cores(), _MOST_WORKERS, len(completions))
        source = FunctionSource(_SCRIPT, "equal", _ADDRESS_SPACE)
        self._workers += [Worker(source) for _ in range(wanted - len(self._workers))]
        calls = [{"completion": text, "answer": answer} for text, answer in zip(completions, answers, strict=True)]
        return [self._verdict(answer) for answer in ask_each(self._workers, calls, self._timeout)]

    def _verdict(self, answer: JsonObject) -> Verdict:
        if "late" in answer:
            return FailedJudgement(f"took more than {self._timeout:g} s")
        if "raised" in answer:
            return FailedJudgement(str(answer["raised"]))
        score: float | None = answer["scores"][0]
        return FailedJudgement("found no expression in the known answer") if score is None else score


#: A line that opens a block of code, in Markdown: what is in front of it, its marks, the first word of what it says.
_OPENS = re.compile(r"( *|[^`]*[^`~])(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$")
_PYTHON = re.compile(r"\{?\.?(python|py)[\d.]*\}?", re.IGNORECASE)
#: No longer code is run.
_MOST_CHARS = 100_000
#: Beyond the program's own time: starting two interpreters, and ending what it leaves behind.
_GRACE_SECONDS = 10.0
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def python_tests(timeout: float = 5.0, memory_mb: int = 512) -> Scorer:
    """Passes where the code of a completion and then the tests, which are the row's ``answer``, run to their end.

    Each program has a process group, a folder and limits of its own (:mod:`ftcli.judges.supervisor`), nothing of this
    process' environment, and ``timeout`` seconds. Limits are no boundary: see docs/grpo.md.
    """

    def score(completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        with ThreadPoolExecutor(usable_cores()) as threads:
            passed = threads.map(partial(_runs_through, seconds=timeout, memory_mb=memory_mb), completions, answers)
            return [float(each) for each in passed]

    return score


def code_of_completion(text: str) -> str:
    """The first fenced block that is called Python or nothing; all of the text where there is none. A block that is
    never ended ends with the text.
    """
    text = text[:_MOST_CHARS]
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        opened = _OPENS.match(line)
        if opened is None:
            continue
        before, marks, name = opened.groups()
        is_python = _PYTHON.fullmatch(name) is not None
        if before.strip() and not is_python:  # marks within a sentence
            continue
        block = _block(lines, marks, before if not before.strip() else "")
        if is_python or not name:
            return block
    return text


def _block(lines: Iterator[str], marks: str, indent: str) -> str:
    """The lines up to the one that ends with ``marks``, which is read too, without the indentation of the first."""
    found: list[str] = []
    for line in lines:
        line = line.removeprefix(indent)
        if line.rstrip().endswith(marks):
            return "".join([*found, line.rstrip().removesuffix(marks)])
        found.append(line)
    return "".join(found)


def _runs_through(completion: str, tests: str, seconds: float, memory_mb: int) -> bool:
    # A number that only the end of the program says: code that leaves early with 0 has passed no test. The program
    # comes on stdin, so that it does not lie in a file beside what it runs.
    number = secrets.randbelow(100) + 101
    program = f"{code_of_completion(completion)}\n\n{tests}\n\nraise SystemExit({number})\n"
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    with tempfile.TemporaryDirectory(prefix="ftcli-tests-") as folder:
        command = [sys.executable, "-I", str(_SUPERVISOR), "program", str(seconds), str(memory_mb * 2**20)]
        try:
            done = subprocess.run(  # noqa: S603 - untrusted on purpose, and contained
                command,
                input=program.encode("utf-8", "replace"),
                env=environment,
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=seconds + _GRACE_SECONDS,
                check=False,
            )
        except (subprocess.TimeoutExpired, OSError):
            return False
    return done.returncode == number
