"""GRPO honours every optimizer, schedule and kind of adapter, or refuses it by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.run.completions import Completions
from ftcli.train import assembly
from tests.chat_server import chat_server
from tests.e2e.conftest import User
from tests.tiers import further

GRPO: dict[str, Any] = {
    "num_generations": 4,
    "max_prompt_length": 48,
    "max_completion_length": 5,
    "rewards": [{"use": "regex", "pattern": "[a-z]"}],  # of five random bytes, as often as not
    "temperature": 2.0,
}
DATA: dict[str, Any] = {
    "train": [{"path": "bundled:smoke-grpo-train", "max_rows": 12}],
    "eval": [{"path": "bundled:smoke-grpo-eval", "max_rows": 4}],
}
EVAL: dict[str, Any] = {"every_steps": 2, "tasks": [{"use": "exact_match"}], "generate": {"max_new_tokens": 2}}

SETTINGS: dict[str, dict[str, Any]] = {
    "muon, LoRA+": {
        "train": {
            "optim": "muon", "loraplus_lr_ratio": 4.0, "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.2},
        }
    },
    "schedule-free, PiSSA": {
        "train": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
        "lora": {"r": 4, "init_lora_weights": "pissa"},
    },
    "QLoRA, ratios of completions": {
        "quantization": {"method": "nf4"},
        "train": {"max_steps": 5},  # a rollout after the one that the checkpoint is in the middle of
        "grpo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2, "beta": 0.02},
    },
    "fp8, on the kernels' torch form, few kept": {
        "quantization": {"method": "fp8"},
        "model": {"kernels": "reference"},
        "train": {"gradient_checkpointing": "selective", "uncheckpointed_layers": 1},
        "grpo": {"loss_type": "cispo", "epsilon_high": 5.0},
    },
    "full, with a reference": {
        "lora": None, "grpo": {"loss_type": "grpo", "beta": 0.1}, "train": {"gradient_checkpointing": "offload"},
    },
    "RLOO, drawn again, penalties, a reference that follows": {
        "train": {"max_steps": 5},
        "grpo": {
            "advantage_estimator": "rloo", "max_resample_times": 2, "overlong_buffer": 3, "overlong_penalty": 0.5,
            "beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 2,
            "num_iterations": 2,
        },
    },
    "GDPO, entropies, two clips, a teacher in NF4": {
        "grpo": {
            "teacher": "bundled:tiny-gemma2", "teacher_quantization": "nf4", "teacher_coef": 0.1, "num_iterations": 2,
            "multi_objective_aggregation": "normalize_then_sum", "entropy_coef": 0.01, "top_entropy_quantile": 0.5,
            "delta": 4.0, "off_policy_mask_threshold": 0.1,
            "rewards": [{"use": "regex", "pattern": "[a-z]"}, {"use": "regex", "pattern": "[0-9]", "weight": 0.5}],
        },
    },
    "full, with a reference that follows": {
        "lora": None,
        "grpo": {
            "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2,
            "advantage_estimator": "reinforce_plus_plus",
        },
    },
    "full, on the kernels' torch form": {
        "lora": None,
        "model": {"kernels": "reference", "dtype": "bfloat16"},
        "train": {"pure_bf16": True, "bf16_stochastic_round": True},
        "grpo": {"beta": 0.1},
    },
    "DoRA on a few layers, plateau, the base that sees the answer in place of rewards": {
        "grpo": {"teacher_coef": 1.0, "teacher_column": "answer", "rewards": []},
        "train": {
            "max_steps": 5, "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 9.0, "threshold_mode": "abs"},
        },
        "lora": {"r": 4, "use_dora": True, "layers_to_transform": [1], "rank_pattern": {"q_proj": 2}},
        "eval": EVAL,
    },
}  # fmt: skip


#: In `make test`: adapters, all weights, and a base that is quantized.
TELLING = ("muon, LoRA+", "full, on the kernels' torch form", "QLoRA, ratios of completions")


@pytest.mark.parametrize("name", [*TELLING, *further(*(name for name in SETTINGS if name not in TELLING))])
def test_a_run_honours_it_and_goes_on_alike(name: str, narrow: User) -> None:
    change = dict(SETTINGS[name])
    train = {"max_steps": 4, "gradient_accumulation_steps": 1, **change.pop("train", {})}
    grpo = {**GRPO, **change.pop("grpo", {})}
    recipe = narrow.recipe("r", train=train, grpo=grpo, data=DATA, checkpoint={"every_steps": 3}, **change)
    narrow.done("grpo", recipe)
    rates = [line["learning_rate"] for line in narrow.metrics("r") if "loss" in line]
    agreed = json.loads((narrow.folder / "r" / "manifest.json").read_text())["log_probs"]
    assert agreed["plain_mean"] <= agreed["allowed_mean"]
    assert agreed["sampler_mean"] is None or agreed["sampler_mean"] <= agreed["allowed_mean"]
    assert any("groups_without_spread" in line for line in narrow.metrics("r"))
    if "lr_scheduler_kwargs" in train:
        assert len(set(rates)) > 1
    assert any(line["grad_norm"] > 0 for line in narrow.metrics("r") if "loss" in line)
    narrow.goes_on_alike("r", recipe, "grpo")


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"lora": {"init_lora_weights": "pissa"}, "grpo": {**GRPO, "beta": 0.1}}, "FT274", "without adapters"),
        ({"train": {"neftune_noise_alpha": 5.0}}, "FT250", "not supported by GRPO"),
        ({"grpo": {**GRPO, "top_p": 0.9}}, "FT277", "grpo.top_p: 0.9 samples from some of the tokens"),
        ({"grpo": {**GRPO, "top_k": 20}}, "FT277", "grpo.top_k: 20 samples from some of the tokens"),
        ({"grpo": {**GRPO, "loss_type": "cispo"}}, "FT276", "which is not set"),
        ({"grpo": {**GRPO, "teacher_coef": 1.0}, "lora": None}, "FT288", "grpo.teacher is absent"),
        ({"grpo": {**GRPO, "rewards": [], "teacher_coef": 1.0}}, "FT288", "learn from itself"),
        ({"grpo": {**GRPO, "teacher_column": "answer"}}, "FT276", "is not read without grpo.teacher_coef"),
        ({"grpo": {**GRPO, "loss_type": "sapo", "epsilon": 0.1}}, "FT276", "grpo.epsilon is not read"),
        ({"grpo": {**GRPO, "stop_strings": ["7"], "mask_truncated_completions": True}}, "FT281", "loss"),
        ({"train": {"train_sampling_strategy": "group_by_length"}}, "FT250", "not supported by GRPO"),
        (
            {"train": {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"min_lr": 0.0, "max_lr": 1.0}},
             "eval": {"every_steps": 2}},
            "FT255", "eval.tasks is empty",
        ),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(change: dict[str, Any], code: str, said: str, user: User) -> None:
    status, document = user.run("grpo", user.recipe("r", **{"grpo": GRPO, "data": DATA, **change}))
    assert status == 2
    assert [
        finding["message"] for finding in document["findings"] if finding["code"] == code and said in finding["message"]
    ]


@pytest.mark.parametrize(("lora", "loaded"), [(None, 2), ({"r": 4}, 1)])
def test_the_reference_is_what_the_run_started_from(
    lora: dict[str, Any] | None, loaded: int, narrow: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full fine-tuning a second model of the same base, loaded in the same way, from which the first step is at no
    distance; also after training went on from a checkpoint.
    """
    calls: list[tuple[Any, ...]] = []
    load = assembly.load_model
    monkeypatch.setattr(assembly, "load_model", lambda *args, **how: calls.append((*args, how)) or load(*args, **how))
    change = {"train": {"max_steps": 3, "gradient_accumulation_steps": 1}, "checkpoint": {"every_steps": 2}}
    recipe = narrow.recipe("r", **change, grpo={**GRPO, "beta": 0.1}, data=DATA, lora=lora)
    narrow.done("grpo", recipe)
    narrow.goes_on_alike("r", recipe, "grpo")
    assert len(calls) == 2 * loaded
    assert all(call == calls[0] for call in calls)
    first, *later = (line["kl"] for line in narrow.metrics("r") if "loss" in line)
    assert first == 0.0
    assert all(kl > 1e-6 for kl in later)


@pytest.mark.parametrize("longest", [1, 5])
def test_micro_batches_whose_completions_are_all_cut_off(longest: int, narrow: User) -> None:
    """With one token all are, in every step; with five, here, those of the first micro-batch."""
    grpo = {**GRPO, "max_completion_length": longest, "mask_truncated_completions": True}
    grpo["early_stopping"] = {"entropy": {"min_entropy": 0.1, "patience": 1}}
    train = {"max_steps": 2, "gradient_accumulation_steps": 2}
    done = narrow.done("grpo", narrow.recipe("r", train=train, grpo=grpo, data=DATA))
    assert done["steps"] == 2  # nothing to learn from is no collapse
    lines = [line for line in narrow.metrics("r") if "loss" in line]
    cut_off = [line["completions/clipped_ratio"] == 1.0 for line in lines]
    assert all(cut_off) or longest == 5
    assert [line["entropy"] == 0.0 for line in lines] == cut_off
    record = json.loads((narrow.folder / "r" / "manifest.json").read_text())
    assert "log_probs" not in record if all(cut_off) else record["log_probs"]["tokens"] > 0


@pytest.mark.parametrize(
    ("stops", "steps", "said"),
    [
        ({"reward": {"window": 2, "patience": 1}}, 4, "the mean reward of 2 rollouts has not risen in 1 measurements"),
        ({"entropy": {"min_entropy": 90.0, "patience": 3}}, 3, "entropy was below 90 nats a token in 3 steps in a row"),
    ],
)
def test_it_ends_where_nothing_more_is_learnt(stops: dict[str, Any], steps: int, said: str, narrow: User) -> None:
    user = narrow
    same, different = {"use": "length", "max_chars": 1000}, {"use": "regex", "pattern": "[A-Z]"}
    grpo = {**GRPO, "temperature": 2.0, "rewards": [same if "reward" in stops else different], "early_stopping": stops}
    change = {"train": {"max_steps": 20}, "grpo": grpo, "data": DATA, "checkpoint": {"every_steps": steps - 1}}
    recipe = user.recipe("r", **change, logging={"every_steps": 7})
    result = user.done("grpo", recipe)
    assert (result["steps"], result["stopped_early"].startswith(said)) == (steps, True)
    assert json.loads((user.folder / "r" / "status.json").read_text())["state"] == "completed"
    assert [line["step"] for line in user.metrics("r") if "loss" in line] == [1, steps]
    page = (user.folder / "r" / "report.html").read_text()
    assert f"Stopped early: {said}" in page
    user.goes_on_alike("r", recipe, "grpo")


def test_a_stop_that_is_never_reached_is_told(user: User) -> None:
    stops = {"reward": {"window": 5, "patience": 1}, "entropy": {"patience": 9}}
    grpo = {**GRPO, "early_stopping": stops}
    status, document = user.run("check", user.recipe("r", grpo=grpo, data=DATA, train={"max_steps": 8}))
    told = [finding["message"] for finding in document["findings"] if finding["code"] == "FT279"]
    assert (status, len(told)) == (0, 2)
    assert "grpo.early_stopping.reward needs 10 steps (2 measurements of 5 rollouts)" in told[0]
    assert "grpo.early_stopping.entropy needs 9 steps" in told[1]


def test_rewards_are_tried_before_a_weight_is_loaded(user: User) -> None:
    file = user.folder / "mine.py"
    file.write_text("async def score(completions, prompts, answer, **columns):\n    return [0.5] * len(completions)\n")
    rewards = [{"use": "exact_match"}, {"file": f"{file}:score", "weight": 2.0}]
    recipe = user.recipe("r", grpo={**GRPO, "rewards": rewards}, data=DATA)
    status, document = user.run("grpo", recipe, "--dry-rewards")
    assert status == 0, document["findings"]
    right, mine = document["result"]["rewards"]
    assert (right["right"], right["others"], right["constant"]) == (1.0, 0.0, False)
    assert (mine["mean"], mine["deviation"], mine["constant"]) == (0.5, 0.0, True)
    assert [finding["code"] for finding in document["findings"] if finding["severity"] == "warning"] == ["FT278"]
    assert document["result"]["rows_without_spread"] == 0
    assert not (user.folder / "r").exists()
    file.write_text("def score(completions, prompts, **columns):\n    raise KeyError('answer')\n")
    status, document = user.run("grpo", recipe, "--dry-rewards")
    assert (status, document["findings"][-1]["code"]) == (4, "FT455")
    assert user.run("train", recipe, "--dry-rewards")[0] == 2


#: Fails on what begins with an even character, as a picky service would.
PICKY = """
def score(completions, prompts, answer, **columns):
    for text in completions:
        if text and ord(text[0]) % 2 == 0:
            raise ValueError("an even number")
    return [1.0 for text in completions]
"""


def test_a_reward_that_fails_on_some_completions(narrow: User) -> None:
    user = narrow
    file = user.folder / "mine.py"
    file.write_text(PICKY)
    rewards = [{"file": f"{file}:score", "on_error": -1.0}, {"use": "json_valid", "json_schema": {"type": "integer"}}]
    train = {"max_steps": 4, "gradient_accumulation_steps": 1}
    grpo = {**GRPO, "rewards": rewards, "reward_failures": {"max_fraction": 1.0}}
    recipe = user.recipe("r", train=train, grpo=grpo, data=DATA, checkpoint={"every_steps": 2})
    status, document = user.run("grpo", recipe)
    assert status == 0, document["findings"]
    (told,) = [finding for finding in document["findings"] if finding["code"] == "FT457"]
    assert "mine.py:score raised ValueError: an even number (" in told["message"]
    assert "to bundled:smoke-grpo-train:" in told["message"]
    failed = [line["rewards/score/failed"] for line in user.metrics("r") if "loss" in line]
    assert 0 < sum(failed) < len(failed)
    assert any(line["rewards/score/mean"] < 1 for line in user.metrics("r") if "loss" in line)
    assert all(line["rewards/json_valid/failed"] == 0 for line in user.metrics("r") if "loss" in line)
    user.goes_on_alike("r", recipe, "grpo")
    none = user.recipe("n", train=train, grpo={**grpo, "reward_failures": {"max_fraction": 0.0}}, data=DATA)
    status, document = user.run("grpo", none)
    assert (status, document["findings"][-1]["code"]) == (4, "FT456")


def test_stop_strings_end_completions_and_rewards_see_what_stands_before(user: User) -> None:
    said, lines = [], []
    for name, more in (("free", {}), ("stopped", {"stop_strings": ["7", "3 "]})):
        grpo = {**GRPO, **more, "rewards": [{"use": "length", "max_chars": 2}]}
        train = {"max_steps": 1, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
        recipe = user.recipe(name, train=train, grpo=grpo, data=DATA)
        user.done("grpo", recipe)
        said.append(Completions(user.folder / name / "completions").read(1))
        lines.append(next(line for line in user.metrics(name) if "loss" in line))
    free, stopped = ([one.text for one in each] for each in said)
    wanted = [text[: min((at for s in ("7", "3 ") if (at := text.find(s)) >= 0), default=len(text))] for text in free]
    assert stopped == wanted != free
    for one in said[1]:
        assert one.rewards["length"] == float(len(one.text.strip()) <= 2)
    clipped = [line["completions/clipped_ratio"] for line in lines]
    assert clipped[1] <= clipped[0], "what a text has ended is not cut off"
    assert lines[1]["completions/mean_terminated_length"] >= 1


def test_a_model_behind_an_address_judges(narrow: User, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its key is in no file of the run; a resumed run asks nothing twice, and has the same numbers."""
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))
    with chat_server(lambda _, body: (200, {}, str(sum(body["messages"][0]["content"].encode()) % 7))) as server:
        endpoint = {"url": server.url, "model": "m", "prompt": "{prompt} {answer} {completion}", "api_key_env": "KEY"}
        grpo = {**GRPO, "rewards": [{"use": "llm_judge", "endpoint": endpoint}]}
        train = {"max_steps": 4, "gradient_accumulation_steps": 1}
        recipe = narrow.recipe("r", train=train, grpo=grpo, data=DATA, checkpoint={"every_steps": 3})
        status, document = narrow.run("grpo", recipe)
        assert (status, [one["code"] for one in document["findings"] if one["severity"] == "error"]) == (2, ["FT470"])
        assert not server.requests
        monkeypatch.setenv("KEY", "s3cret")
        narrow.done("grpo", recipe)
        assert {headers["Authorization"] for _, headers, _ in server.requests} == {"Bearer s3cret"}
        first = next(line for line in narrow.metrics("r") if "loss" in line)
        assert first["rewards/llm_judge/requests"] + first["rewards/llm_judge/cached"] == 4
        asked = len(server.requests)
        lines = [line["reward"] for line in narrow.metrics("r") if "loss" in line]
        result = narrow.folder / "r" / "adapter" / "adapter_model.safetensors"
        weights = result.read_bytes()
        narrow.cut_off("r")
        narrow.done("grpo", recipe)
        assert [line["reward"] for line in narrow.metrics("r") if "loss" in line] == lines
        assert (result.read_bytes(), len(server.requests)) == (weights, asked)
    for path in (narrow.folder / "r").rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("judge", "code"),
    [
        ({"use": "llm_judge"}, "FT265"),
        ({"use": "regex", "pattern": "x", "endpoint": {"url": "http://a", "model": "m", "prompt": "{completion}"}},
         "FT265"),
        ({"use": "llm_judge", "endpoint": {"url": "a.com", "model": "m", "prompt": "{completion}"}}, "FT208"),
        ({"use": "llm_judge", "endpoint": {"url": "http://a", "model": "m", "prompt": "say"}}, "FT208"),
        (
            {"use": "llm_judge", "endpoint": {
                "url": "http://a", "model": "m", "prompt": "{completion}", "api_key_env": "sk-proj-1234"}},
            "FT208",
        ),
    ],
)  # fmt: skip
def test_addresses_that_cannot_be_asked(judge: dict[str, Any], code: str, user: User) -> None:
    status, document = user.run("check", user.recipe("r", grpo={**GRPO, "rewards": [judge]}, data=DATA))
    assert status == 2
    assert [finding["code"] for finding in document["findings"] if finding["severity"] == "error"] == [code]
