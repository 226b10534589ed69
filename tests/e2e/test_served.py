"""GRPO's rollouts by a stand-in for vLLM's server: each step's adapter, one batch ahead, resumed, and faults."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.assets import asset
from tests.e2e.conftest import User
from tests.e2e.test_grpo_settings import DATA, GRPO
from tests.rollout_server import RolloutServer, rollout_server
from tests.tiers import telling

TRAIN: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-2,
}  # fmt: skip


def recipe_of(user: User, server: RolloutServer, name: str = "r", **grpo: Any) -> str:
    address = {"url": server.url, "retries": 1, "timeout": 20}
    rewards = [{"use": "regex", "pattern": "[0-4]"}]
    change = {**GRPO, "server": address, "rewards": rewards, **grpo}
    return user.recipe(name, train=TRAIN, grpo=change, data=DATA, checkpoint={"every_steps": 2}, eval={"samples": 0})


def rollouts(server: RolloutServer) -> list[str]:
    """The adapters that completions were asked of, one after the other."""
    asked = [body["model"] for path, body in server.requests if path == "/v1/completions"]
    return list(dict.fromkeys(asked))


def test_a_run_learns_from_what_a_server_samples_ahead_and_goes_on_alike(user: User) -> None:
    with rollout_server(asset("models", "tiny-gemma2")) as server:
        recipe = recipe_of(user, server, steps_ahead=1)
        user.done("grpo", recipe)
        lines = [line for line in user.metrics("r") if "loss" in line]
        stale = [line["stale_tokens"] for line in lines]
        # The first step's adapter is no other than the base, so it cannot be told whether it is used.
        assert [bool(one) for one in stale] == [False, False, True, True]
        assert all(line["sampling/sampling_logp_difference/mean"] < 1e-4 for line in lines if not line["stale_tokens"])
        assert len(rollouts(server)) == 3, "the third rollout is of the second one's adapter"
        assert not server.loaded
        assert not list((user.folder / "r").glob("served*"))
        sent = next(body for path, body in server.requests if path == "/v1/completions")
        assert (sent["temperature"], sent["top_p"], sent["repetition_penalty"], sent["ignore_eos"]) == (2.0, 1, 1, True)
        user.goes_on_alike("r", recipe, "grpo")


#: What is wrong with a server, and how that is told.
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "adapters passed over": ({"fault": "base"}, "FT716", "samples by the base model"),
    "raw log-probabilities": ({"fault": "raw"}, "FT708", "differ by"),
    "a stale adapter": ({"fault": "stale"}, "FT708", "other log-probabilities"),
    "no room": ({"max_model_len": 32}, "FT520", "takes 32 tokens"),
}


@pytest.mark.parametrize(("settings", "code", "said"), telling(FAULTS, "adapters passed over"))
def test_a_server_that_does_otherwise_is_found_out(settings: dict[str, Any], code: str, said: str, user: User) -> None:
    with rollout_server(asset("models", "tiny-gemma2"), **settings) as server:
        status, document = user.run("grpo", recipe_of(user, server))
    found = [one for one in document["findings"] if one["code"] == code]
    assert status == (1 if code == "FT708" else 3)
    assert found
    assert said in found[0]["message"]


def test_what_a_server_cannot_be_given_is_refused(user: User) -> None:
    for change, said in (
        ({"lora": None}, "all weights are trained"),
        ({"lora": {"r": 4, "init_lora_weights": "pissa"}}, "which init_lora_weights changes"),
        ({"grpo": {**GRPO, "steps_ahead": 1}}, "is not read without grpo.server"),
    ):
        grpo = {**GRPO, "server": {"url": "http://localhost:1"}}
        status, document = user.run("check", user.recipe("r", **{"grpo": grpo, "data": DATA, **change}))
        assert (status, document["findings"][0]["code"]) == (2, "FT276")
        assert said in document["findings"][0]["message"]
