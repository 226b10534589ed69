"""Which families keep documents of a row apart on transformers' own layers: the table of those that do not is right."""

from __future__ import annotations

import pytest
import torch

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import FtcliError
from ftcli.plan.precision import DtypePlan
from ftcli.tables.packing import LEAKING
from ftcli.train.assembly import check_isolation
from tests.small_models import FURTHER, MULTIMODAL, STRUCTURES, TEXT, build, by_kind

PLAN = DtypePlan("float32", "float32", "float32", autocast=False, reason="")


def documents() -> list[TokenizedRow]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(5, 250, (length,), generator=generator).tolist() for length in (19, 27, 40)]
    return [TokenizedRow(number, ids, ids) for number, ids in enumerate(drawn)]


def leaks(model_type: str) -> tuple[str, bool]:
    """The language model's type, and whether its documents see each other."""
    model = build(model_type)
    code = ""
    try:
        check_isolation(model, documents(), PLAN, torch.device("cpu"), pad_token_id=0)
    except FtcliError as error:
        code = error.findings[0].code
    return model.config.get_text_config().model_type, code == "FT443"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", by_kind([*TEXT, *MULTIMODAL, *FURTHER], (*STRUCTURES, "qwen3_next", "lfm2")))
def test_the_table_says_whether_documents_see_each_other(model_type: str) -> None:
    text_type, found = leaks(model_type)
    assert found == (text_type in LEAKING)


def test_every_family_of_the_table_was_tried() -> None:
    assert {name.removesuffix("_text") for name in LEAKING} <= {*TEXT, *MULTIMODAL, *FURTHER}
