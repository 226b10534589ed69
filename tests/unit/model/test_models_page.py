"""docs/models.md says of each family what a small random model of it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.family_outcomes import outcome_of, page, stated
from tests.small_models import MULTIMODAL, TEXT

TEXT_OF_PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
#: One that everything works for, one that cannot be quantized; the others have `make test-families`.
TELLING = ("llama", "gpt2")


def test_the_page_lists_the_families_that_are_tested_and_is_up_to_date() -> None:
    listed = stated(TEXT_OF_PAGE)
    assert set(listed) == {*TEXT, *MULTIMODAL}
    assert page(listed) == TEXT_OF_PAGE, "run: python docs/tools/models_page.py"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("shared_clean")
@pytest.mark.parametrize("model_type", TELLING)
def test_the_page_is_right(model_type: str, tmp_path: Path) -> None:
    assert outcome_of(model_type, tmp_path) == stated(TEXT_OF_PAGE)[model_type]


@pytest.mark.families
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("shared_clean")
@pytest.mark.parametrize("model_type", sorted({*TEXT, *MULTIMODAL} - set(TELLING)))
def test_the_page_is_right_of_every_other_family(model_type: str, tmp_path: Path) -> None:
    assert outcome_of(model_type, tmp_path) == stated(TEXT_OF_PAGE)[model_type]
