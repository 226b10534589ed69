"""Turns the recipe's rewards into functions that TRL can call, with every result checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ftcli.config import RewardConfig
from ftcli.errors import ExitCode, FtcliError, Origin
from ftcli.trainers.rewards.builtin import exact_match, regex_match
from ftcli.trainers.rewards.user import load_function

Score = Callable[..., list[float | None]]
RESERVED = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})


@dataclass(frozen=True, slots=True)
class Reward:
    """``function(prompts, completions, **columns)`` gives one number (or None: no opinion) for each completion."""

    name: str
    weight: float
    function: Score


def build_rewards(rewards: Sequence[RewardConfig], columns: Collection[str]) -> list[Reward]:
    """All rewards, their names made unique.

    Args:
        columns: Columns of the data that are handed to each function by name.

    Raises:
        FtcliError: FT451 and FT452 for a user's function that cannot be loaded; FT453 (exit 4) when ``exact_match``
            needs a column that the data lacks; FT454 (exit 4) for columns with reserved names.
    """
    clash = sorted(RESERVED & set(columns))
    if clash:
        raise FtcliError.single(
            "FT454",
            f"the data has a column named {clash[0]!r}, which GRPO uses itself",
            exit_code=ExitCode.DATA,
            help="rename it in the file",
        )
    built: list[Reward] = []
    for config in rewards:
        name = config.use or str(config.file).rpartition(":")[2]
        same = sum(r.name.split("#")[0] == name for r in built)
        name = f"{name}#{same + 1}" if same else name
        function = _named(_score(config, columns), name)
        built.append(Reward(name, config.weight, function))
    return built


def _score(config: RewardConfig, columns: Collection[str]) -> Score:
    if config.use == "exact_match":
        return _exact_match(config, columns)
    if config.use == "regex":
        pattern = re.compile(config.pattern or "", re.DOTALL)
        return lambda prompts, completions, **_: list(regex_match(completions, pattern))
    spec = str(config.file)
    return _checked(load_function(spec), spec, dict(config.args))


def _exact_match(config: RewardConfig, columns: Collection[str]) -> Score:
    column = config.answer
    if column not in columns:
        raise FtcliError.single(
            "FT453",
            f"the reward exact_match compares with column {column!r}, which the data does not have",
            exit_code=ExitCode.DATA,
            help=f"set the reward's `answer` to one of: {', '.join(sorted(columns)) or 'none'}",
        )
    extract = re.compile(config.extract, re.DOTALL) if config.extract is not None else None

    def score(prompts: Sequence[str], completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        return list(exact_match(completions, [str(answer) for answer in kwargs[column]], extract))

    return score


def _checked(function: Callable[..., Any], spec: str, args: dict[str, Any]) -> Score:
    def score(prompts: Sequence[str], completions: Sequence[str], **kwargs: Any) -> list[float | None]:
        known = {key: value for key, value in kwargs.items() if key not in RESERVED}
        try:
            result = function(completions=list(completions), prompts=list(prompts), **known, **args)
        except Exception as error:
            sample = completions[0][:200] if completions else ""
            raise _bad(spec, f"raised {type(error).__name__}: {error} (first completion: {sample!r})") from error
        return _numbers(spec, result, len(completions))

    return score


def _numbers(spec: str, result: Any, expected: int) -> list[float | None]:
    if not isinstance(result, list | tuple) or len(result) != expected:
        found = f"{len(result)} values" if isinstance(result, list | tuple) else type(result).__name__
        raise _bad(spec, f"returned {found}, a list of {expected} numbers was expected")
    for index, value in enumerate(result):
        number = value is None or (isinstance(value, int | float) and math.isfinite(value))
        if not number:
            raise _bad(spec, f"returned {value!r} for completion {index + 1}; expected a finite number or None")
    return [None if value is None else float(value) for value in result]


def _bad(spec: str, message: str) -> FtcliError:
    return FtcliError.single("FT455", f"the reward {spec} {message}", exit_code=ExitCode.DATA, origin=Origin(spec))


def _named(function: Score, name: str) -> Score:
    def call(*args: Any, **kwargs: Any) -> list[float | None]:
        return function(*args, **kwargs)

    call.__name__ = name  # TRL logs rewards under the function's name
    return call
