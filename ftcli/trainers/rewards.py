"""The recipe's rewards as functions that TRL can call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ftcli.config import RewardConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.judges import RESERVED, UserJudge, built_in, load_function, missing_answer, reserved_column
from ftcli.tables import judges

Score = Callable[..., list[float | None]]


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
        FtcliError: FT451 and FT452 for a user's function that cannot be loaded; FT453 (exit 4) when a reward needs a
            column that the data lacks; FT454 (exit 4) for columns with reserved names. The functions raise FT455 (exit
            4) when a user's function does not return one number, or None, for each completion.
    """
    taken = reserved_column(columns)
    if taken is not None:
        raise FtcliError([taken], ExitCode.DATA)
    built: list[Reward] = []
    for config in rewards:
        name = config.use or str(config.file).rpartition(":")[2]
        same = sum(r.name.split("#")[0] == name for r in built)
        name = f"{name}#{same + 1}" if same else name
        score = _users(config) if config.use is None else _built_in(config, config.use, columns)
        built.append(Reward(name, config.weight, score))
    return built


def _users(config: RewardConfig) -> Score:
    spec = str(config.file)
    judge = UserJudge(spec, load_function(spec), config.args, code="FT455", what="the reward")

    def score(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        return judge.scores(completions, prompts, {k: v for k, v in columns.items() if k not in RESERVED})

    return score


def _built_in(config: RewardConfig, use: str, columns: Collection[str]) -> Score:
    missing = missing_answer(config, columns)
    if missing is not None:
        raise FtcliError([missing], ExitCode.DATA)
    compares, judge = judges.row(use).compares, built_in(config, use)

    def score(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        answers = [str(answer) for answer in columns[config.answer]] if compares else [""] * len(completions)
        return list(judge(completions, answers))

    return score
