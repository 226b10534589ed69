"""The section `grpo` has TRL's names and defaults, but for what is listed here with its reason."""

from __future__ import annotations

from dataclasses import MISSING, fields

from trl import GRPOConfig

from ftcli.methods.grpo.settings import GrpoConfig

#: Keys that TRL does not have.
OWN = {
    "rewards",  # TRL takes functions as arguments of its trainer
    "max_prompt_length",  # a longer prompt is an error here; TRL has no such limit any more
    "stop_strings",
    "reward_failures",
    "shuffle_rewards",
    "early_stopping",
    "completions_kept",
    "advantage_estimator",  # TRL has a trainer for RLOO, and none for REINFORCE++
    "max_resample_times",
    "environment",  # TRL's trainer takes environment_factory
    "overlong_buffer",  # TRL has a reward function
    "overlong_penalty",
    # TRL has teachers in trainers of their own
    "teacher",
    "teacher_revision",
    "teacher_quantization",
    "teacher_column",
    "teacher_coef",
    "server",  # vllm_mode and others, flat
    "steps_ahead",
}
#: Keys whose default is another here: ours, TRL's.
OTHERWISE = {"max_completion_length": (256, 512)}


def test_names_and_defaults_are_trls() -> None:
    theirs = {field.name: field for field in fields(GRPOConfig)}
    ours = GrpoConfig.model_fields
    assert set(ours) - set(theirs) == OWN
    for name in set(ours) & set(theirs):
        default = theirs[name].default
        assert default is not MISSING, name
        found = (ours[name].default, default)
        assert found[0] == found[1] or OTHERWISE.get(name) == found, f"{name}: {found[0]} here, {found[1]} in TRL"
