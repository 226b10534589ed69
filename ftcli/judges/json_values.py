"""The judge `json_valid`: one JSON value and nothing else, which may have to fit a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.judges.verdicts import FailedJudgement, Scorer, Verdict
from ftcli.paths import exists, expanded, is_file
from ftcli.plain import JsonObject
from ftcli.time_limit import TookTooLong, limited_time

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

#: Lists and maps in each other; a deeper value does not pass. Python's own limit depends on who calls.
MAX_DEPTH = 100
#: Of a completion: parsing and validation.
SECONDS = 1.0
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
        raise FtcliError.single("FT280", f"json_schema {error}", exit_code=ExitCode.RECIPE, help=help) from error

    def score(completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return [_passes(text, validator) for text in completions]

    return score


def validator_of(json_schema: str | JsonObject) -> Validator:
    """A validator of values against a schema of any draft (2020-12 if it names none).

    References lead to the schema itself or to the drafts' own; nothing is fetched.

    Raises:
        NoSchema: there is no such file; it is no JSON; no schema by its draft; a reference leads elsewhere, or in
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


def _passes(text: str, validator: Validator | None) -> Verdict:
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
    if _depth(text) > MAX_DEPTH:
        raise ValueError("too deep")
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(name)


def _depth(text: str) -> int:
    """Depth of lists and maps in each other, brackets within strings aside."""
    deepest = depth = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest
