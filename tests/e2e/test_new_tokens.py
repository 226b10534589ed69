"""New tokens, from a recipe to a file of llama.cpp: PEFT and transformers answer as the run does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.gguf import ReadFile
from tests.e2e.conftest import User, merged
from tests.small_models import build
from tests.tiers import further
from tests.unit.export.conftest import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's remarks on tied embeddings

TOKENS = ["<ask>", "<tell>"]
ROW = {
    "messages": [
        {"role": "user", "content": "<ask>red"},
        {"role": "assistant", "content": "<tell>blue"},
    ]
}
#: The tokens' ids: the bundled tokenizer has 264.
IDS = [264, 265]


#: Ties, quantization, and rows that the base has: some that no token has, or none.
FORMS = ["tied none 272", "untied nf4 264", *further("untied none 272", "tied nf4 264", "tied none 264")]


def base_of(folder: Path, *, tied: bool, dtype: torch.dtype = torch.float32, rows: int = 272) -> Path:
    """A model with a few rows that no token has."""
    model = build("llama", vocab_size=rows, tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def settings(base: Path, data: Path, **change: Any) -> dict[str, Any]:
    data.write_text(f"{json.dumps(ROW)}\n" * 12, encoding="utf-8")
    return {
        "model": {"name_or_path": str(base), "add_tokens": TOKENS, "dtype": "float32"},
        "data": {"train": [str(data)], "eval": [str(data)]},
        "train": {"max_steps": 6, "learning_rate": 1e-2},
        "checkpoint": {"every_steps": 3},
        "eval": {"every_steps": 3, "samples": 0},
        **change,
    }


@pytest.mark.parametrize("form", FORMS)
def test_only_their_rows_are_trained_resumed_and_exported(form: str, user: User, tmp_path: Path) -> None:
    tied, quantization = form.startswith("tied"), {"method": form.split()[1]}
    base = base_of(tmp_path / "base", tied=tied, rows=int(form.split()[2]))
    formats = {"formats": ["adapter", "safetensors", "gguf"], "gguf": {"types": ["f32"]}}
    recipe = user.recipe(**settings(base, tmp_path / "rows.jsonl", quantization=quantization, export=formats))
    checked = user.done("check", recipe)
    done = user.done("train", recipe)
    run = user.folder / "r"
    trained = load_file(run / "adapter" / "adapter_model.safetensors")
    rows = {name: tensor for name, tensor in trained.items() if "lora_" not in name}
    ends = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    assert sorted(name.split(".")[-3] for name in rows) == ends
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert sorted(config["trainable_token_indices"].values()) == [IDS] * len(ends)
    before = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    embedding = next(tensor for name, tensor in rows.items() if "embed_tokens" in name)
    assert embedding.shape == (2, before.shape[1])
    assert float((embedding - before[:264].mean(0)).norm()) > 1e-3
    assert checked["adapters"]["parameters"] == sum(tensor.numel() for tensor in trained.values())

    before_training = json.loads((run / "eval.json").read_text())["base"]["loss"]
    user.goes_on_alike("r", recipe)
    told = user.done("eval", recipe, "--run", str(run))
    assert told["run"]["loss"] == pytest.approx(done["eval"]["loss"], rel=1e-6)
    assert told["base"]["loss"] == pytest.approx(before_training, rel=1e-6)

    user.done("export", str(run))
    own = AutoTokenizer.from_pretrained(run / "export" / "safetensors")
    assert own.convert_tokens_to_ids(TOKENS) == IDS
    ids = own("<ask>red<tell>", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert 264 in ids
    model = AutoModelForCausalLM.from_pretrained(run / "export" / "safetensors", dtype=torch.float32)
    file = ReadFile(next((run / "export" / "gguf").glob("*.gguf")))
    assert [file.values["tokenizer.ggml.tokens"][id] for id in IDS] == TOKENS
    assert torch.equal(file.read("token_embd.weight")[IDS], embedding)
    assert torch.equal(model.get_input_embeddings().weight[IDS], embedding)
    said = user.done("chat", str(run), "--prompt", "<ask>red", "--raw", "--max-new-tokens", "6")["completion"]
    asked = own("<ask>red", return_tensors="pt")
    going_on = model.generate(**asked, max_new_tokens=6, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert own.decode(going_on, skip_special_tokens=True).startswith(said.rstrip()[:8])
    if form.split()[1] != "nf4":
        unchanged = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if len(own) > unchanged.config.vocab_size:
            unchanged.resize_token_embeddings(len(own))
        plain = PeftModel.from_pretrained(unchanged, run / "adapter")
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


def test_full_fine_tuning_begins_with_the_mean_of_the_others(user: User, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", tied=True)
    change = settings(base, tmp_path / "rows.jsonl", lora=None, checkpoint={"every_steps": None})
    change["train"] |= {"learning_rate": 1e-12, "max_steps": 1}
    user.done("train", user.recipe(**change))
    before, after = (
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        for folder in (base, user.folder / "r/model")
    )
    torch.testing.assert_close(after[264:266], before[:264].mean(0).expand(2, -1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(after[266:], before[266:], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"add_tokens": ["<ask>", "<eos>"]}}, "has '<eos>' already, as id"),
        ({"model": {"add_tokens": ["<ask>", "<ask>"]}}, "names '<ask>' twice"),
        ({"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}}, "modules_to_save"),
        ({"lora": {"init_lora_weights": "pissa"}}, "init_lora_weights"),
        ({"train": {"method": "dpo"}}, "supervised fine-tuning alone"),
        ({"launch": {"engine": "fsdp", "num_processes": 2}}, "launch.engine"),
    ],
)
def test_what_cannot_be_is_said_before(
    change: dict[str, Any], said: str, user: User, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_of(tmp_path / "base", tied=False)
    recipe = user.recipe(**merged(settings(base, tmp_path / "rows.jsonl"), change))
    status, answer = user.run("check", recipe)
    found = [each for each in answer["findings"] if each["code"] == "FT352"]
    assert status in (2, 3)
    assert len(found) == 1, answer
    assert re.search(said, found[0]["message"])
