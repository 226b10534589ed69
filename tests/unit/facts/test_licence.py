"""The licence of a base model, by its card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ftcli.config.model import ModelConfig
from ftcli.config.yaml import MapNode, Origins
from ftcli.errors import Origin
from ftcli.facts.licence import Licence, licence_of
from ftcli.facts.model import ModelFacts, read_facts


@pytest.fixture
def facts(tmp_path: Path) -> ModelFacts:
    origins = Origins(MapNode(Origin("r.yaml"), {}))
    found = read_facts(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True, origins=origins)
    return replace(found, folder=tmp_path, source="local folder")


@pytest.mark.parametrize(("card", "licence"), [
    ("---\nlicense: apache-2.0\n---\n# x\n", Licence("apache-2.0")),
    ("---\r\nlicense: mit\r\n---\r\n", Licence("mit")),
    ("---\nlicense: [mit, gpl-3.0]\n---\n", Licence("mit")),
    ("---\nlicense: other\nlicense_name: my-own\nlicense_link: https://x.org/l\n---\n",
     Licence("other", "my-own", "https://x.org/l")),
    ("---\nlicense: other\nlicense_link: javascript:alert(1)\nlicense_name: '<b>'\n---\n", Licence("other")),
    ("---\nlicense: 'a]b(c'\n---\n", None),
    ("---\nlicense: {a: 1}\n---\n", None),
    ("---\nlicense: [\n---\n", None),
    ("---\n" + "[" * 5000 + "\n---\n", None),
    ("---\n- license\n---\n", None),
    ("# no front matter\nlicense: mit\n", None),
    ("", None),
])  # fmt: skip
def test_the_licence_of_a_local_model(facts: ModelFacts, card: str, licence: Licence | None) -> None:
    (facts.folder / "README.md").write_text(card, newline="")
    assert licence_of(facts, None, offline=True) == licence


def test_without_a_card_nothing_is_known(facts: ModelFacts) -> None:
    assert licence_of(facts, None, offline=True) is None


def test_a_model_of_the_hub_is_asked_for_its_card(facts: ModelFacts, tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    card.write_text("---\nlicense: gemma\n---\n")
    asked: list[object] = []

    def fetch(repo: str, revision: str | None, offline: bool) -> Path | None:
        asked.append((repo, revision, offline))
        return card

    of_hub = replace(facts, name="google/gemma-2-9b", source="hub")
    assert licence_of(of_hub, "main", offline=False, fetch=fetch) == Licence("gemma")
    assert asked == [("google/gemma-2-9b", "main", False)]
    assert licence_of(of_hub, None, offline=True, fetch=lambda *_: None) is None
