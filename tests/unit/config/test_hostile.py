"""Recipes that nobody writes by accident: each is refused with a code, at once, and no secret is shown."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftcli.assets import bundled_file
from ftcli.cli.render import Style, findings_text
from ftcli.config.load import Override, load_recipe
from ftcli.config.secrets import mask, mask_lines
from ftcli.errors import FtcliError
from ftcli.paths import expanded, is_file, is_folder

RECIPE = "version: 1\nmodel: {name_or_path: 'bundled:tiny-gemma2'}\ndata: {max_seq_len: 8}\n"


def refused(tmp_path: Path, text: str) -> FtcliError:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FtcliError) as caught:
        load_recipe(path)
    return caught.value


@pytest.mark.parametrize(
    ("escape", "code"), [("\\U00110000", "FT110"), ("\\uDFFF", "FT120"), ("\\ud800", "FT120"), ("a\\0b", "FT120")]
)
def test_escapes_that_stand_for_no_character(tmp_path: Path, escape: str, code: str) -> None:
    for line in (f'run: {{name: "{escape}"}}', f'"{escape}": 1', f'train: {{optim: ["{escape}"]}}'):
        error = refused(tmp_path, RECIPE + line + "\n")
        finding = next(finding for finding in error.findings if finding.code == code)
        assert finding.origin is not None
        assert finding.origin.line == 4
    with pytest.raises(FtcliError, match=code):
        load_recipe(tmp_path / "r.yaml", [Override(f'run.name="{escape}"', "--set")])


@pytest.mark.parametrize(
    "lines",
    [
        "password: a,SECRET",
        "password: [a, SECRET, c]",
        "token: {a: 1, b: SECRET}",
        "run: {password: 'a} SECRET', name: x}",
        "password:\n  - a\n  - SECRET\n  - : [",
        "password:\n- SECRET\n- : [",
        "logging:\n  - hf_token:\n      deep: SECRET: [\n",
        "password: |\n  first\n\n  SECRET\n\t",
        "wandb_api_key:\n  SECRET: {",
        "x: &a SECRET\npassword: *a",
        "x: {y: &a [b, SECRET]}\nrun: {password: [c, *a]}",
        "x: &a\n  - b: c\n  - SECRET\ntoken: *a",
        "headers: {Authorization: Bearer SECRET}",
        "source: https://user:SECRET@host/x",
        "source: [s3://:SECRET@host, postgres://me:SECRET@db:5432/x]",
    ],
)
def test_no_finding_shows_a_secret(tmp_path: Path, lines: str) -> None:
    error = refused(tmp_path, RECIPE + lines + "\n")
    assert "SECRET" not in findings_text(error.findings, Style(color=False))


def test_addresses_without_a_password_are_shown() -> None:
    for line in ("x: https://host:8080/a@b", "x: s3://me@host/a:b", "x: file:///a:b@c", "&a: *b", "x: a*b &c"):
        assert mask(line) == line
    assert mask("x: https://user:pw@host/x") == "x: https://*******@host/x"


def test_keys_of_an_override_do_not_nest_without_end(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    with pytest.raises(FtcliError, match=r"FT130: the override names a key 50,001 levels deep"):
        load_recipe(tmp_path / "r.yaml", [Override("a." * 50_000 + "b=1", "--set")])


def test_what_follows_a_secret_is_shown_again() -> None:
    lines = ["password:", "- a", "name: x", "x:", "  - token: b", "    c: d", "  - e: f"]
    assert mask_lines(lines) == ["password:", "* *", "name: x", "x:", "  - token: *", "    c: d", "  - e: f"]


def test_a_very_long_word_is_masked_at_once() -> None:
    begin = time.process_time()
    for word in (
        "a" * 200_000,
        "a-" * 100_000,
        "a_" * 100_000,
        " " * 200_000,
        "token: " * 30_000,
        "hf_" * 60_000,
        "://a:" * 40_000,
        "&a " * 60_000,
        "://" + "a" * 200_000,
    ):
        mask(word)
    assert time.process_time() - begin < 60  # looked at from each place on, one word would take minutes


def test_paths_that_no_file_can_have() -> None:
    assert expanded("~") == Path.home()
    assert str(expanded("~no-such-user-here/x")) == "~no-such-user-here/x"
    for name in ("x" * 5000, "a\0b", "/root/\ud800"):
        assert not is_file(Path(name))
        assert not is_folder(Path(name))


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", "a/../../../b", "a\0"])
def test_nothing_outside_the_bundle_has_a_bundled_name(name: str) -> None:
    path = bundled_file("templates", name)
    assert path.resolve().parent == bundled_file("templates", "x").resolve().parent


def test_a_tilde_is_the_home_folder_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r.yaml").write_text(
        "version: 1\nmodel: {name_or_path: ~/m, tokenizer: ~/t}\ndata: {max_seq_len: 8, chat_template: ~/c.jinja}\n"
        "run: {output_dir: ~/out, resume: ~/old}\n"
    )
    recipe = load_recipe(tmp_path / "r.yaml").recipe
    found = (recipe.model.name_or_path, recipe.model.tokenizer, recipe.data.chat_template, recipe.run.output_dir)
    assert found == tuple(str(tmp_path / name) for name in ("m", "t", "c.jinja", "out"))
    assert recipe.run.resume == str(tmp_path / "old")
