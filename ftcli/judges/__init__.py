"""Judges score completions: rewards of GRPO and tasks of evaluation, built in or the user's, called in one way."""

from ftcli.judges.builtin import BuiltIn, built_in, missing_answer
from ftcli.judges.user import Function, UserJudge, columns_of, file_of, judges_of, load_function

__all__ = [
    "BuiltIn",
    "Function",
    "UserJudge",
    "built_in",
    "columns_of",
    "file_of",
    "judges_of",
    "load_function",
    "missing_answer",
]
