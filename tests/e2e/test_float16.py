"""A whole run in float16: scaled losses, skipped overflows, and a resume that takes the scale up again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.e2e.conftest import User

# float16 products are emulated on a CPU, element by element: nothing larger would do.
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "vocab_size": 264, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.05, "tie_word_embeddings": True,
}  # fmt: skip


def recipe(user: User, name: str, steps: int) -> str:
    folder = user.folder / "tiny"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return user.recipe(
        name,
        model={"name_or_path": str(folder), "init": "random", "tokenizer": "bytes", "dtype": "float16"},
        data={"train": [{"path": "bundled:smoke-train", "max_rows": 4}], "eval": []},
        train={"max_steps": steps, "per_device_train_batch_size": 1, "lr_scheduler_type": "constant"},
        checkpoint={"every_steps": 2},
    )


def test_a_run_resumes_with_its_loss_scale(user: User) -> None:
    user.done("train", recipe(user, "whole", 4))
    manifest = json.loads((user.folder / "whole" / "manifest.json").read_text())
    assert manifest["dtype_plan"]["compute"] == "float16"
    assert manifest["dtype_plan"]["loss_scaling"] is True
    whole = user.losses("whole")
    assert len(whole) == 4

    shutil.copytree(user.folder / "whole", user.folder / "part")
    run = user.cut_off("part")
    assert (run / "checkpoints" / "step-00000002" / "scaler.pt").is_file()
    user.done("train", recipe(user, "part", 4))
    assert user.losses("part") == whole
    assert_same_adapters(user.folder / "whole", user.folder / "part")


def assert_same_adapters(first: Path, second: Path) -> None:
    name = Path("adapter") / "adapter_model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes()
