"""`ftcli grpo --dry-rewards`: the recipe's rewards on texts that are there already, before any weight is loaded.

No model answers, so a few rows get as completions their own known answer, those of other rows, and nothing at all. A
reward that tells none of these apart will hardly tell a model's first answers apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.config.load import LoadedRecipe
from ftcli.errors import Finding
from ftcli.facts.device import named_device
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.preflight.stages import checked
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.judges import JudgeScores
    from ftcli.methods.grpo.rewards import Reward

#: Rows that are scored, and answers of other rows that each of them gets.
ROWS, OTHERS = 16, 3


@dataclass(frozen=True, slots=True)
class DryReward:
    """What one reward said.

    Attributes:
        right, others: Its mean for known answers, and for all other texts; None where there were none.
        without_opinion: Texts that it did not judge.
        failed: Texts that it failed on.
        constant: It said the same of all.
    """

    reward: str
    weight: float
    mean: float | None
    deviation: float | None
    right: float | None
    others: float | None
    without_opinion: int
    failed: int
    constant: bool


@dataclass(frozen=True, slots=True)
class DryRewards:
    """What `ftcli grpo --dry-rewards` answers. ``rows_without_spread``: all of their texts have the same sum."""

    rewards: tuple[DryReward, ...]
    rows: int
    texts: int
    rows_without_spread: int


def dry_rewards(loaded: LoadedRecipe, session: Session) -> DryRewards:
    """Scores sample texts for the first rows.

    Raises FtcliError as preflight does, whatever machine this is, and whatever the rewards raise.
    """
    from ftcli.data.asked import asked_rows
    from ftcli.job import open_job
    from ftcli.judges import columns_of
    from ftcli.methods.grpo.prompts import room_of_grpo
    from ftcli.methods.grpo.rewards import build_rewards

    report = checked(loaded, session, "grpo", named_device("b200"))  # the largest: which one it will be is no matter
    job, grpo = open_job(report, session), report.recipe.grpo
    assert grpo is not None  # preflight refuses such a recipe (FT260)
    data = job.recipe.data
    asked, _ = asked_rows(data.train, data, job.tokenizer, room_of_grpo(grpo), offline=session.offline, max_rows=ROWS)
    columns = columns_of([one.prompt for one in asked])
    texts = _texts(len(asked), _answers(grpo, columns))
    places = [row for row, group in enumerate(texts) for _ in group]
    lent = {name: [values[row] for row in places] for name, values in columns.items()}
    flat = [text for group in texts for text in group]
    prompts = [asked[row].text for row in places]
    rewards = build_rewards(grpo.rewards, columns)
    origins = [asked[row].prompt.row.origin for row in places]
    of_rows = [asked[row].prompt for row in places]
    scored = [reward.scores(prompts, flat, lent, origins, asked=of_rows) for reward in rewards]
    scores = [each.values for each in scored]
    first = [at == 0 or places[at] != places[at - 1] for at in range(len(places))]
    known = bool(_answers(grpo, columns))
    found = tuple(_said(reward, said, first if known else None) for reward, said in zip(rewards, scored, strict=True))
    for one, said in zip(found, scored, strict=True):
        if said.example is not None:
            session.reporter.warn(said.example)
        if one.constant:
            session.reporter.finding(_constant(one, len(flat)))
    sums = [sum(r.weight * (s[at] or 0.0) for r, s in zip(rewards, scores, strict=True)) for at in range(len(flat))]
    spread: dict[int, set[float]] = {}
    for place, total in zip(places, sums, strict=True):
        spread.setdefault(place, set()).add(total)
    return DryRewards(found, len(asked), len(flat), sum(len(totals) < 2 for totals in spread.values()))


def _answers(grpo: GrpoConfig, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """The rows' known answers: the column that a reward compares with; none where there is none."""
    names = [reward.answer for reward in grpo.rewards if reward.answer in columns]
    return [str(value) for value in columns[names[0]]] if names else []


def _texts(rows: int, answers: Sequence[str]) -> list[list[str]]:
    """For each row: its own answer, the next ones that are others, and nothing. The own answer comes first."""
    made = []
    for row in range(rows):
        own = answers[row : row + 1]
        following = dict.fromkeys(answers[(row + step) % rows] for step in range(1, rows)) if answers else {}
        others = [text for text in following if text not in own][:OTHERS]
        made.append([*own, *others, ""] if answers else ["", "I do not know.", "0"])
    return made


def _said(reward: Reward, found: JudgeScores, right: Sequence[bool] | None) -> DryReward:
    scores = found.values
    judged = [score for score in scores if score is not None]

    def mean(which: bool) -> float | None:
        if right is None:
            return None
        chosen = [s for s, own in zip(scores, right, strict=True) if s is not None and own is which]
        return statistics.fmean(chosen) if chosen else None

    return DryReward(
        reward.name,
        reward.weight,
        statistics.fmean(judged) if judged else None,
        statistics.pstdev(judged) if judged else None,
        mean(True),
        mean(False),
        len(scores) - len(judged),
        len(found.failed),
        bool(judged) and math.isclose(max(judged), min(judged)),
    )


def _constant(one: DryReward, texts: int) -> Finding:
    return Finding(
        "FT278",
        f"the reward {one.reward} is {one.mean:g} for all of {texts} sample texts: known answers, answers of other "
        "rows, and no text",
        help="right for a reward of form that no sample meets; otherwise check its columns, pattern or function",
        severity="warning",
    )
