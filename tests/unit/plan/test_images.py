"""What images take in the memory estimate: nothing where rows have none."""

from __future__ import annotations

from pathlib import Path

from ftcli.config.load import Override, load_recipe
from ftcli.facts.device import named_device
from ftcli.preflight.stages import preflight

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3-vl-8b.yaml"


def parts(*settings: str) -> dict[str, int]:
    loaded = load_recipe(RECIPE, [Override(each, "--set") for each in settings])
    report = preflight(loaded, command="check", device=named_device("h200"), offline=True)
    assert report.memory is not None
    return dict(report.memory.parts)


def test_pixels_and_what_the_tower_saw_are_counted_where_rows_have_images() -> None:
    """Of Qwen3-VL-8B: four patches of 1,536 numbers a token, and 4,096 numbers once and twice for three layers."""
    found = parts("data.max_seq_len=1024", "train.per_device_train_batch_size=2")
    assert found["images"] == 2 * 1024 * (4 * 3 * 2 * 16**2 + 4096 * (1 + 2 * 3)) * 2
    assert "images" not in parts("data.train=['bundled:sample-chat']", "data.eval=['bundled:sample-chat-eval']")
