"""docs/models.md says of each family what a small random model of it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models_page import page, stated

from ftcli.data.tokens import Tokens
from ftcli.errors import FtcliError
from ftcli.facts.precision import DtypePlan
from ftcli.rows.row import Row
from ftcli.trainers.isolation import check_isolation
from tests.small_models import MULTIMODAL, TEXT, VOCABULARY, build

TEXT_OF_PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
PLAN = DtypePlan("float32", "float32", "float32", False, "a test")


def packs(model_type: str) -> bool:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in (24, 31, 40):
        ids = torch.randint(5, VOCABULARY - 8, (length,), generator=generator).tolist()
        rows.append(Tokens(Row("d", length, {}), ids, list(ids)))
    try:
        check_isolation(build(model_type), rows, PLAN, torch.device("cpu"), pad_token_id=0)
    except FtcliError:
        return False
    return True


def test_the_page_lists_the_families_that_are_tested_and_is_up_to_date() -> None:
    listed = stated(TEXT_OF_PAGE)
    assert set(listed) == {*TEXT, *MULTIMODAL}
    assert page(listed) == TEXT_OF_PAGE, "run: python docs/tools/models_page.py"


@pytest.mark.parametrize("model_type", [*TEXT, *MULTIMODAL])
def test_packing_is_what_the_page_says(model_type: str) -> None:
    assert packs(model_type) == stated(TEXT_OF_PAGE)[model_type]
