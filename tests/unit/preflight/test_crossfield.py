"""Rules that need the recipe alone: what is refused by name, what contradicts, what has no effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.methods.grpo import checks as grpo
from ftcli.preflight.checks import crossfield, data, support

GRPO = """
data: {train: [bundled:sample-math], max_seq_len: 1024}
train: {per_device_train_batch_size: 8, gradient_accumulation_steps: 2}
grpo: {num_generations: 8, max_prompt_length: 256, max_completion_length: 256, rewards: [{use: exact_match}]}
"""


def codes(findings: Any) -> list[str]:
    return [finding.code for finding in findings]


def test_a_plain_recipe_has_no_findings(context: Callable[..., Any]) -> None:
    plain = context("lora: {r: 8}\ndata: {train: [a.jsonl], eval: [b.jsonl]}\n")
    for check in (support.check, crossfield.check, grpo.check, data.check_files):
        assert list(check(plain)) == []


def test_a_plain_grpo_recipe_has_no_findings(context: Callable[..., Any]) -> None:
    for check in (support.check, crossfield.check, grpo.check, data.check_files):
        assert list(check(context(GRPO))) == []


@pytest.mark.parametrize(
    "setting",
    [
        "model.attention=flash_attention_2",
        "model.attention=flex_attention",
        "model.attention=triton",
    ],
)
def test_what_no_code_carries_out_is_refused_by_name(setting: str, context: Callable[..., Any]) -> None:
    findings = list(support.check(context("lora: {r: 8}\n", setting)))
    assert codes(findings) == ["FT250"]
    key, _, value = setting.partition("=")
    assert key in findings[0].message
    assert value.strip("[]").split(", ")[-1] in findings[0].message
    assert str(findings[0].origin) == f"--set {setting}"
    assert findings[0].help.startswith("use ")


@pytest.mark.parametrize(("name", "package"), [("gguf", "gguf"), ("fp8", "compressed_tensors")])
def test_a_format_without_its_package_is_refused_before_training(
    name: str, package: str, context: Callable[..., Any]
) -> None:
    asked = context("lora: {r: 8}\n", f"export.formats=[{name}]")
    (finding,) = support.check(asked, installed=lambda each: each != package)
    assert finding.code == "FT253"
    assert finding.help == f"pip install 'ftcli[{name}]'"
    assert not list(support.check(asked, installed=lambda _: True))


@pytest.mark.parametrize("command", ["train", "eval", "export", "bench"])
def test_the_refusal_does_not_depend_on_the_command(command: str, context: Callable[..., Any]) -> None:
    assert "FT250" in codes(support.check(context("lora: {r: 8}\n", "model.attention=triton", command=command)))


@pytest.mark.parametrize(("command", "expected"), [("eval", ["FT253"]), ("check", ["FT253"]), ("train", [])])
def test_the_harness_is_asked_for_where_it_is_used(
    command: str, expected: list[str], context: Callable[..., Any]
) -> None:
    made = context("data: {train: [a.jsonl], eval: [b.jsonl]}\neval: {lm_eval: [hellaswag]}\n", command=command)
    findings = list(crossfield.check(made, lambda package: False))
    assert codes(findings) == expected
    assert all("ftcli[eval]" in finding.help for finding in findings)
    assert list(crossfield.check(made, lambda package: True)) == []


def test_a_task_has_one_judge(tmp_path: Path, context: Callable[..., Any]) -> None:
    file = tmp_path / "judges.py"
    file.write_text("def f(completions, prompts, **columns):\n    return []\n")
    data = "data: {eval: [b.jsonl]}\n"
    both = context(f"{data}eval: {{tasks: [{{use: contains, file: '{file}:f'}}]}}\n", command="eval")
    assert codes(crossfield.check(both)) == ["FT767"]
    unread = context(f"{data}eval: {{tasks: [{{use: contains, args: {{a: 1}}}}]}}\n", command="eval")
    assert codes(crossfield.check(unread)) == ["FT767"]
    assert list(crossfield.check(context(f"{data}eval: {{tasks: [{{file: '{file}:f'}}]}}\n", command="eval"))) == []
    missing = f"{data}eval: {{tasks: [{{file: '{file}:g'}}]}}\n"
    assert codes(crossfield.check(context(missing, command="eval"))) == ["FT451"]
    assert "FT451" not in codes(crossfield.check(context(missing, command="train")))


@pytest.mark.parametrize(
    "setting", ["model.kernels=triton", "model.kernels=reference", "train.gradient_checkpointing=offload"]
)
def test_grpo_trains_on_kernels_under_every_policy(setting: str, context: Callable[..., Any]) -> None:
    assert list(support.check(context(GRPO, setting))) == []


@pytest.mark.parametrize(
    "setting", ["model.kernels=reference", "model.kernels=triton", "model.kernels=off", "model.attention=eager"]
)
def test_what_is_carried_out_is_accepted(setting: str, context: Callable[..., Any]) -> None:
    assert list(support.check(context("", setting))) == []


@pytest.mark.parametrize("command", ["train", "eval", "export", "bench", "grpo"])
def test_nf4_with_adapters_is_carried_out(command: str, context: Callable[..., Any]) -> None:
    assert list(support.check(context(GRPO, "quantization.method=nf4", "lora.r=8", command=command))) == []


def test_packed_weights_need_adapters(context: Callable[..., Any]) -> None:
    assert "FT251" in codes(support.check(context("", "quantization.method=nf4")))
    assert "FT251" not in codes(support.check(context("lora: {r: 8}\n", "quantization.method=nf4")))
    assert "FT251" not in codes(support.check(context("", "quantization.method=bitnet")))


def test_remote_code_is_never_run(context: Callable[..., Any]) -> None:
    assert codes(support.check(context("", "model.trust_remote_code=true"))) == ["FT252"]


def test_a_missing_tracker_is_named_with_its_install_command(context: Callable[..., Any]) -> None:
    asked = context("logging: {wandb: true, tensorboard: true}\n")
    absent = list(support.check(asked, lambda package: False))
    assert codes(absent) == ["FT253", "FT253"]
    assert [finding.help for finding in absent] == ["pip install 'ftcli[tensorboard]'", "pip install 'ftcli[wandb]'"]
    assert list(support.check(asked, lambda package: True)) == []


@pytest.mark.parametrize(
    ("text", "command", "code", "key"),
    [
        ("", "train", "FT254", "data.train"),
        ("data: {train: [a.jsonl]}\n", "eval", "FT255", "data.eval"),
        ("data: {train: [a.jsonl]}\neval: {every_steps: 5}\n", "train", "FT255", "every_steps"),
        ("data: {train: [a.jsonl]}\neval: {tasks: [{use: exact_match}]}\n", "check", "FT255", "exact_match"),
        ("data: {train: [a.jsonl], format: text, loss_on: assistant}\n", "train", "FT256", "loss_on"),
        ("data: {train: [a.jsonl], format: text, loss_on: completion}\n", "train", "FT256", "loss_on"),
        (
            "data: {train: [a.jsonl], eval: [b.jsonl]}\neval: {tasks: [{use: regex}]}\n",
            "check",
            "FT264",
            "needs a pattern",
        ),
        (
            "data: {train: [a.jsonl], eval: [b.jsonl]}\neval: {tasks: [{use: regex, pattern: '('}]}\n",
            "check",
            "FT264",
            "regular expression",
        ),
        (
            "data: {train: [a.jsonl], eval: [b.jsonl]}\neval: {tasks: [{use: contains, pattern: x}]}\n",
            "check",
            "FT264",
            "only read by",
        ),
        (
            "data: {train: [a.jsonl], eval: [b.jsonl]}\neval: {tasks: [{}, {}]}\n",
            "check",
            "FT266",
            "exact_match",
        ),
        (
            "data: {train: [a.jsonl], eval: [b.jsonl], max_seq_len: 64}\neval: {tasks: [{}]}\n",
            "check",
            "FT267",
            "max_new_tokens",
        ),
        ("data: {train: [a.jsonl]}\ntrain: {max_steps: 5, warmup_steps: 5}\n", "train", "FT268", "warmup_steps"),
        ("data: {train: [a.jsonl]}\nexport: {formats: [adapter]}\n", "check", "FT269", "adapter"),
    ],
)
def test_contradictions(text: str, command: str, code: str, key: str, context: Callable[..., Any]) -> None:
    findings = list(crossfield.check(context(text, command=command)))
    assert codes(findings) == [code]
    assert key in findings[0].message
    assert findings[0].severity == "error"
    assert findings[0].origin is not None


@pytest.mark.parametrize("command", ["eval", "export"])
def test_a_trial_shorter_than_its_warm_up_can_be_used(command: str, context: Callable[..., Any]) -> None:
    """`train --max-steps 5` warns and leaves the setting in the run's recipe, which `export` then refused."""
    text = "data: {train: [a.jsonl], eval: [b.jsonl]}\ntrain: {max_steps: 5, warmup_steps: 10}\n"
    assert codes(crossfield.check(context(text, command=command))) == []


@pytest.mark.parametrize("command", ["bench", "export"])
def test_commands_that_read_no_rows_ask_for_none(command: str, context: Callable[..., Any]) -> None:
    assert list(crossfield.check(context("eval: {every_steps: 5}\n", command=command))) == []


@pytest.mark.parametrize(
    "text",
    [
        "train: {lr_scheduler_type: constant, warmup_steps: 10}\n",
        "eval: {generate: {temperature: 0.5}}\n",
        "train: {optim: sgd, adam_beta1: 0.8}\n",
        "train: {max_steps: 5}\ncheckpoint: {every_steps: 10}\n",
    ],
)
def test_settings_without_effect_are_warned_of(text: str, context: Callable[..., Any]) -> None:
    findings = list(crossfield.check(context(f"data: {{train: [a.jsonl]}}\n{text}")))
    assert [(f.code, f.severity) for f in findings] == [("FT259", "warning")]


def test_a_trial_on_the_command_line_is_not_warned_of(context: Callable[..., Any]) -> None:
    trial = context("data: {train: [a.jsonl]}\ncheckpoint: {every_steps: 10}\n", "train.max_steps=5")
    assert list(crossfield.check(trial)) == []


def test_grpo_needs_its_section(context: Callable[..., Any]) -> None:
    assert codes(grpo.check(context("data: {train: [a.jsonl]}\n", command="grpo"))) == ["FT260"]
    assert codes(grpo.check(context("data: {train: [a.jsonl]}\n", command="train"))) == []


@pytest.mark.parametrize(
    ("rows", "steps", "group", "made_for", "fine"),
    [
        (8, 1, 8, None, True), (2, 4, 8, None, True), (1, 1, 8, None, False), (3, 4, 8, None, False),
        (6, 1, 4, None, False), (2, 2, 8, 4, True), (2, 2, 8, 6, False), (3, 1, 8, 6, False), (6, 1, 4, 2, True),
    ],
)  # fmt: skip
def test_whole_groups_in_a_generation_batch_as_trl_counts(
    rows: int, steps: int, group: int, made_for: int | None, fine: bool, context: Callable[..., Any], tmp_path: Path
) -> None:
    from trl import GRPOConfig

    sizes = {
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, "num_generations": group,
        "steps_per_generation": made_for,
    }  # fmt: skip
    recipe = context(
        GRPO,
        f"train.per_device_train_batch_size={rows}",
        f"train.gradient_accumulation_steps={steps}",
        f"grpo.num_generations={group}",
        f"grpo.steps_per_generation={'null' if made_for is None else made_for}",
    )
    findings = list(grpo.check(recipe))
    assert codes(findings) == ([] if fine else ["FT261"])
    if fine:
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **sizes)
        return
    with pytest.raises(ValueError, match="divisible"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **sizes)
    key = "gradient_accumulation_steps" if made_for is None else "steps_per_generation"
    suggested = int(findings[0].help.split(f"{key}: ")[1].split(",")[0])
    assert rows * suggested % group == 0


def test_no_optimizer_step_learns_from_completions_of_two_policies(context: Callable[..., Any]) -> None:
    (finding,) = grpo.check(context(GRPO, "train.gradient_accumulation_steps=4", "grpo.steps_per_generation=6"))
    assert (finding.code, finding.help) == ("FT261", "use grpo.steps_per_generation: 8")


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("data.max_seq_len=511", "FT262"),
        ("grpo.rewards=[]", "FT263"),
        ("grpo.rewards=[{use: regex, pattern: x, weight: 0}, {use: length, max_chars: 9, weight: 0}]", "FT263"),
        ("grpo.rewards=[{weight: 1.0}]", "FT263"),
        ("grpo.rewards=[{use: regex, file: 'a.py:f', pattern: x}]", "FT263"),
        ("grpo.rewards=[{use: regex}]", "FT264"),
        ("grpo.rewards=[{use: regex, pattern: '[a'}]", "FT264"),
        ("grpo.rewards=[{use: exact_match, pattern: x}]", "FT264"),
        ("grpo.rewards=[{use: exact_match, extract: 'no group'}]", "FT264"),
        ("grpo.rewards=[{use: regex, pattern: x, args: {a: 1}}]", "FT265"),
        ("grpo.rewards=[{use: regex, pattern: x, answer: y}]", "FT265"),
        ("grpo.rewards=[{file: 'nowhere.py:score'}]", "FT451"),
        ("grpo.epsilon_high=0.1", "FT270"),
        ("grpo.delta=1.1", "FT270"),
    ],
)
def test_grpo_mistakes(setting: str, code: str, context: Callable[..., Any]) -> None:
    findings = list(grpo.check(context(GRPO, setting)))
    assert codes(findings) == [code]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["loss_type=cispo", "epsilon_high=5", "delta=9"], "grpo.delta is not read by grpo.loss_type: cispo"),
        (["advantage_estimator=reinforce_plus_plus", "scale_rewards=none"], "scales over all completions"),
        (["advantage_estimator=reinforce_plus_plus", "max_resample_times=2"], "teach, too"),
        (["multi_objective_aggregation=normalize_then_sum", "advantage_estimator=rloo"], "each reward is by itself"),
        (["multi_objective_aggregation=normalize_then_sum", "scale_rewards=none"], "scaled in its group"),
        (["overlong_penalty=2"], "without grpo.overlong_buffer"),
        (["overlong_buffer=256"], "every completion would be punished"),
        (["use_bias_correction_kl=false"], "without grpo.beta"),
        (["sync_ref_model=true"], "there is no reference"),
        (["beta=0.1", "ref_model_sync_steps=8"], "without grpo.sync_ref_model"),
        (["beta=0.1", "ref_model_mixup_alpha=0.5"], "without grpo.sync_ref_model"),
    ],
)
def test_settings_that_nothing_reads(settings: list[str], said: str, context: Callable[..., Any]) -> None:
    findings = list(grpo.check(context(GRPO, *(f"grpo.{one}" for one in settings))))
    assert [(finding.code, said in finding.message) for finding in findings] == [("FT276", True)]


@pytest.mark.parametrize("base", [["advantage_estimator=rloo"], ["advantage_estimator=rloo", "scale_rewards=batch"]])
def test_settings_that_go_together(base: list[str], context: Callable[..., Any]) -> None:
    more = ["overlong_buffer=8", "overlong_penalty=2", "max_resample_times=2", "delta=4", "beta=0.1"]
    assert not list(grpo.check(context(GRPO, *(f"grpo.{one}" for one in [*base, *more]))))


def test_adapters_are_not_mixed_with_earlier_ones(context: Callable[..., Any]) -> None:
    words = ("grpo.beta=0.1", "grpo.sync_ref_model=true", "lora={r: 4}")
    (finding,) = grpo.check(context(GRPO, *words))
    assert (finding.code, "no mixture" in finding.message) == ("FT274", True)
    assert not list(grpo.check(context(GRPO, *words, "grpo.ref_model_mixup_alpha=1")))


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("def score(completions, prompts, **columns):\n    return [0.0]\n", None),
        ("def score(*, completions, prompts, answer):\n    return [0.0]\n", None),
        ("def score(**everything):\n    return [0.0]\n", None),
        ("from rewards_library import score\n", None),
        ("score = make_score()\n", None),
        ("if True:\n    def score(completions, prompts): ...\n", None),
        ("try:\n    from fast import score\nexcept ImportError:\n    def score(completions, prompts): ...\n", None),
        ("try:\n    import x\nexcept ImportError:\n    def score(answers): ...\n", "FT452"),
        ("class Judge:\n    def score(self, completions, prompts): ...\n", "FT451"),
        ("def other(completions, prompts, **columns): ...\n", "FT451"),
        ("def score(answers):\n    return [0.0]\n", "FT452"),
        ("async def score(completions, prompts, **columns): ...\n", None),
        ("async def score(answers): ...\n", "FT452"),
        ("def score(:\n", "FT452"),
        ("raise SystemExit('must not be run')\ndef score(completions, prompts): ...\n", None),
    ],
)
def test_reward_files_are_read_and_not_run(
    source: str, code: str | None, context: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    findings = list(grpo.check(context(GRPO, f"grpo.rewards=[{{file: '{file}:score'}}]")))
    assert codes(findings) == ([] if code is None else [code])


def test_files_beside_the_data(context: Callable[..., Any], tmp_path: Path) -> None:
    missing = list(data.check_files(context("", "data.chat_template=nowhere.jinja")))
    assert codes(missing) == ["FT424"]
    unknown = list(data.check_files(context("", "data.chat_template=gema")))
    assert codes(unknown) == ["FT424"]
    assert "gemma" in unknown[0].help
    assert list(data.check_files(context("", "data.chat_template=gemma"))) == []
    assert codes(data.check_files(context("", f"run.resume={tmp_path}/none"))) == ["FT725"]
    assert list(data.check_files(context("", f"run.resume={tmp_path}"))) == []


@pytest.mark.parametrize("setting", ["lambda_warmup_steps=9", "use_rms_norm=true"])
def test_what_trains_rounded_weights_has_no_effect_on_frozen_ones(context: Callable[..., Any], setting: str) -> None:
    given = ("quantization.method=bitnet", f"quantization.{setting}")
    (finding,) = [each for each in crossfield.check(context("lora: {}\n", *given)) if each.code == "FT259"]
    assert "frozen" in finding.message
    assert "FT259" not in codes(crossfield.check(context("", *given)))


def test_a_rounding_warm_up_that_outlasts_training_is_told(context: Callable[..., Any]) -> None:
    method = "quantization.method=bitnet"
    found = crossfield.check(context("", method, "quantization.lambda_warmup_steps=9", "train.max_steps=9"))
    (finding,) = [each for each in found if each.code == "FT268"]
    assert "rounds everything" in finding.message
    assert finding.severity == "warning"
    rest = crossfield.check(context("", method, "quantization.lambda_warmup_steps=8", "train.max_steps=9"))
    assert "FT268" not in codes(rest)


def test_grpo_shares_the_model_but_no_rows(context: Callable[..., Any]) -> None:
    def codes(launch: str) -> list[str]:
        made = context(f"data: {{train: [d.jsonl]}}\ngrpo: {{}}\nlaunch: {launch}\n", command="grpo")
        return [finding.code for finding in support.check(made) if "not supported by GRPO" in finding.message]

    assert codes("{num_processes: 2, context_parallel_size: 2}") == ["FT250"]
    assert codes("{engine: fsdp, num_processes: 2}") == codes("{num_processes: 2}") == []


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ("formats: [gguf], gguf: {types: [q8_0, q4_k_m]}", ["FT758"]),
        ("formats: [ollama], gguf: {types: [q5_k_m]}", ["FT758"]),
        ("formats: [ollama], gguf: {types: [q8_0, q5_k_m]}", []),
        ("formats: [safetensors], gguf: {types: [q5_k_m]}", []),
    ],
)
def test_a_program_that_export_will_lack_is_named_before_training(
    settings: str, codes: list[str], context: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = list(support.check(context(f"lora: {{}}\nexport: {{{settings}}}\n"), installed=lambda _: True))
    assert [(finding.code, finding.severity) for finding in found] == [(code, "note") for code in codes]
    (tmp_path / "llama-quantize").touch(mode=0o755)
    assert not list(support.check(context(f"lora: {{}}\nexport: {{{settings}}}\n"), installed=lambda _: True))
