"""Judges score completions: rewards of GRPO and tasks of evaluation, built in or the user's, called in one way."""

from ftcli.judges.builtin import BuiltIn, built_in, missing_answer
from ftcli.judges.user import (
    RESERVED,
    Function,
    UserJudge,
    columns_of,
    file_of,
    judges_of,
    load_function,
    reserved_column,
)

__all__ = [
    "RESERVED",
    "BuiltIn",
    "Function",
    "UserJudge",
    "built_in",
    "columns_of",
    "file_of",
    "judges_of",
    "load_function",
    "missing_answer",
    "reserved_column",
]
