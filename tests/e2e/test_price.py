"""`ftcli check --price`: time and cost of a run, and the cheapest GPU on which it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import User


def priced(user: User, *words: str, **change: Any) -> tuple[int, dict[str, Any]]:
    model = {"name_or_path": "google/gemma-2-2b", "init": "random", "tokenizer": "bytes", "dtype": "auto"}
    change = {"model": model, "train": {"per_device_train_batch_size": 4, "max_steps": None}, **change}
    return user.run("check", user.recipe("r", **change), *words)


def test_time_and_cost_come_from_the_recipes_own_rows(user: User) -> None:
    status, document = priced(user, "--as", "h100", "--price", "2.49")
    assert status == 0, document["findings"]
    found = document["result"]["forecast"]
    assert found["steps"] == 10  # 40 rows of the source, 4 at a time
    assert found["exact"] is True
    assert found["within"] == 0.15
    assert found["cost"] == pytest.approx(2.49 * found["seconds"] / 3600)
    assert "forecast" not in priced(user, "--as", "h100")[1]["result"]


def test_the_cheapest_that_fits_is_named(user: User, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("h100: 2.49\nl4: 0.2\nb200: 0.01\nt4: 100\n")
    status, document = priced(user, "--as", "all", "--price", str(tmp_path / "prices.yaml"))
    assert status == 0
    gpus = {each["gpu"]: each for each in document["result"]["gpus"]}
    assert document["result"]["cheapest"] == "b200"
    assert "cost" not in gpus["a100-80gb"]
    assert gpus["l4"]["cost"] / gpus["l4"]["seconds"] == pytest.approx(0.2 / 3600)
    assert gpus["l4"]["within"] == 0.4
    one = priced(user, "--as", "all", "--price", "1")[1]["result"]
    costs = {each["gpu"]: each["cost"] for each in one["gpus"] if each["verdict"] == "fits" and "cost" in each}
    assert one["cheapest"] == min(costs, key=lambda gpu: costs[gpu])


def test_what_is_not_known_is_said(user: User) -> None:
    unknown = {"name_or_path": "google/gemma-2-2b", "dtype": "auto", "init": "random"}
    _, document = priced(user, "--as", "h100", "--price", "1", model=unknown)
    assert "result" in document, document
    (said,) = [each for each in document["result"]["not_made"] if each["check"] == "time and cost"]
    assert "tokenizer" in said["reason"]


@pytest.mark.parametrize("price", ["cheap", "-1", "nan", "prices.txt", "1e9"])
def test_a_price_that_is_none_is_refused(price: str, user: User, tmp_path: Path) -> None:
    (tmp_path / "prices.txt").write_text("- 3\n")
    status, document = priced(user, "--as", "h100", "--price", price.replace("prices", str(tmp_path / "prices")))
    assert (status, document["findings"][0]["code"]) == (2, "FT150")


def test_a_price_of_no_gpu_is_refused(user: User, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("h1000: 2\n")
    status, document = priced(user, "--as", "all", "--price", str(tmp_path / "prices.yaml"))
    assert (status, document["findings"][0]["code"]) == (2, "FT506")
