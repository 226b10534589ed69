"""Judges score completions: rewards of GRPO and tasks of evaluation, built in or the user's, called in one way."""

from ftcli.judges.builtin import missing_answer
from ftcli.judges.endpoint import JudgeAccess
from ftcli.judges.judge import (
    CALLED_WITH,
    NO_ACCESS,
    Judge,
    columns_of,
    file_of,
    files_of,
    judge_name,
    judges_of,
    judging_tasks,
    open_judge,
    reserved_column,
)
from ftcli.judges.verdicts import CompletionBatch, JudgeScores

__all__ = [
    "CALLED_WITH",
    "NO_ACCESS",
    "CompletionBatch",
    "Judge",
    "JudgeAccess",
    "JudgeScores",
    "columns_of",
    "file_of",
    "files_of",
    "judge_name",
    "judges_of",
    "judging_tasks",
    "missing_answer",
    "open_judge",
    "reserved_column",
]
