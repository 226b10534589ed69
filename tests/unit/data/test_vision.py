"""Rows with images as tokens: counted from sizes, in the form of transformers' processors, cut and refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bytes_tokenizer import write_tokenizer
from PIL import Image
from transformers import AutoTokenizer

from ftcli.config.data import DataConfig
from ftcli.config.model import ModelConfig
from ftcli.data.collate import with_images
from ftcli.data.encode import Encoder
from ftcli.data.pixels import PixelReader
from ftcli.data.prepare import PreparedData, prepare
from ftcli.data.survey import RowSurvey
from ftcli.data.tokens import TokenizedRow, shown_digest
from ftcli.data.vision import Vision, load_vision, named
from ftcli.errors import FtcliError
from ftcli.labels import IGNORE_INDEX
from ftcli.model.tokenizer import load_tokenizer
from ftcli.reporting import SilentReporter
from ftcli.rows.row import Row
from ftcli.tables.images import TABLE
from ftcli.time_limit import TimeBudget
from tests.vision import encoded, processor_of

TINY = ModelConfig(name_or_path="bundled:tiny-qwen3-vl", init="random")
CONFIG = {"model_type": "qwen3_vl"}
TOKENIZER = load_tokenizer(TINY, offline=True)


def seen(max_pixels: int | None = None) -> Vision:
    found = load_vision(TINY, CONFIG, TOKENIZER, max_pixels, offline=True)
    assert not isinstance(found, str)
    return found


def picture(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels))


def chat(*contents: Any) -> dict[str, Any]:
    """Turns of a user and an assistant, in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]}


def shown(*texts: str) -> list[dict[str, str]]:
    """A content with an image before each text."""
    return [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})]


def text(words: str) -> list[dict[str, str]]:
    """A content of one part: a column of a table holds lists alone."""
    return [{"type": "text", "text": words}]


def write(folder: Path, rows: Sequence[dict[str, Any]], images: dict[str, bytes]) -> str:
    for name, content in images.items():
        (folder / name).write_bytes(content)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(path: str, vision: Vision | str | None = None, cache: Path | None = None, **settings: Any) -> PreparedData:
    data = DataConfig.model_validate({"train": [path], "max_seq_len": 256, **settings})
    stops = (int(TOKENIZER.eos_token_id),)
    return prepare(data.train, data, TOKENIZER, stops, vision=vision or seen(), cache_dir=cache)


def codes(caught: Any) -> list[tuple[str, int | None]]:
    return [(finding.code, finding.origin.line) for finding in caught.value.findings]


def decoded(tokens: TokenizedRow) -> str:
    return str(TOKENIZER.decode(tokens.input_ids))


def test_tokens_of_an_image_bear_no_loss_and_come_in_order(tmp_path: Path) -> None:
    """However it is held: a path, a data URL; and the pixels are those of the file."""
    url = f"data:image/png;base64,{base64.b64encode(picture(64, 16, 1)).decode()}"
    rows = [{"images": ["a.png", url], **chat(shown("one", "two"), "yes")}, chat("plain", "no")]
    found = prepared(write(tmp_path, rows, {"a.png": picture()}))
    first, second = found.sequences
    pads = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    assert decoded(first) == f"<|im_start|>user\n{pads}one{pads}two<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert [image.grid for image in first.images] == [(2, 2), (1, 4)]
    assert second.images == ()
    trained = [i for i, label in zip(first.input_ids, first.labels, strict=True) if label != IGNORE_INDEX]
    assert TOKENIZER.decode(trained) == "yes<|im_end|>"
    read = PixelReader(seen(), torch.float32).of([first])
    wanted = seen().processor(
        [Image.open(tmp_path / "a.png"), Image.fromarray(np.asarray(Image.open(_file(tmp_path, picture(64, 16, 1)))))],
        return_tensors="pt",
    )
    assert torch.equal(read["pixel_values"], wanted["pixel_values"])
    assert torch.equal(read["image_grid_thw"], wanted["image_grid_thw"])
    assert found.ledgers[0].counts["images"] == 2
    assert found.ledgers[0].counts["image_tokens"] == 8


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "other.png"
    path.write_bytes(content)
    return path


def test_loss_on_all_leaves_images_out(tmp_path: Path) -> None:
    path = write(tmp_path, [{"images": ["a.png"], **chat(shown("q"), "a")}], {"a.png": picture()})
    (tokens,) = prepared(path, loss_on="all").sequences
    pads = [label for i, label in zip(tokens.input_ids, tokens.labels, strict=True) if i == seen().token_id]
    assert pads == [IGNORE_INDEX] * 4
    trained = [i for i, label in zip(tokens.input_ids, tokens.labels, strict=True) if label != IGNORE_INDEX]
    assert "<|vision_start|><|vision_end|>q<|im_end|>" in str(TOKENIZER.decode(trained))


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"images": ["a.png"], **chat("q", "a")}, "FT412"),
        ({"images": ["none.png"], **chat(shown("q"), "a")}, "FT412"),
        ({"images": ["cut.png"], **chat(shown("q"), "a")}, "FT412"),
        ({"images": ["long.png"], **chat(shown("q"), "a")}, "FT412"),
        (
            {
                "images": ["a.png"],
                "messages": [{"role": "system", "content": shown("be kind")}, *chat("q", "a")["messages"]],
            },
            "FT415",
        ),
        ({"images": ["a.png"], **chat([*shown("q"), {"type": "text", "text": "<|image_pad|>"}], "a")}, "FT415"),
        (chat("what is <|image_pad|>?", "a token"), "FT415"),
    ],
)
def test_faults_are_found_by_row(tmp_path: Path, row: dict[str, Any], code: str) -> None:
    """Places that differ, files that are absent or cut or thin as a hair, an image that the template does not show, and
    text that would be taken for one.
    """
    images = {"a.png": picture(), "cut.png": picture()[:-40], "long.png": picture(4200, 1)}
    path = write(tmp_path, [{"images": ["a.png"], **chat(shown("q"), "a")}, row], images)
    with pytest.raises(FtcliError) as caught:
        prepared(path)
    assert codes(caught) == [(code, 2)]


def test_a_run_that_does_not_see_says_why(tmp_path: Path) -> None:
    path = write(tmp_path, [{"images": ["a.png"], **chat(shown("q"), "a")}], {"a.png": picture()})
    with pytest.raises(FtcliError) as caught:
        prepared(path, "train.method: dpo trains on text alone")
    assert "dpo trains on text alone" in caught.value.findings[0].message


def test_why_nothing_is_seen(tmp_path: Path) -> None:
    def why(config: dict[str, Any], model: ModelConfig = TINY, tokenizer: Any = TOKENIZER, pixels: Any = None) -> str:
        found = load_vision(model, config, tokenizer, pixels, offline=True)
        assert isinstance(found, str)
        return found

    assert "trained on text alone" in why({"model_type": "llama"})
    assert "muse_glimmer" in why({"model_type": "muse_glimmer"})
    plain = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2", tokenizer="bytes"), offline=True)
    assert "<|image_pad|>" in why(CONFIG, tokenizer=plain)
    assert "image processor" in why(CONFIG, ModelConfig(name_or_path=str(tmp_path)))


def test_nothing_is_cut_inside_an_image(tmp_path: Path) -> None:
    rows = [{"images": ["a.png", "a.png"], **chat(shown("one"), "yes", shown("two"), "no")}]
    path = write(tmp_path, rows, {"a.png": picture()})
    (whole,) = prepared(path).sequences
    (first, end), (second, last) = [(begin, end) for begin, end, _ in seen().spans(whole)]
    for limit in range(end + 30, len(whole.input_ids)):
        (cut,) = prepared(path, max_seq_len=limit, overlong="truncate").sequences
        kept = second if second < limit < last else limit
        assert cut.input_ids == whole.input_ids[:kept]
        assert len(cut.images) == (2 if limit >= last else 1)
        assert cut.image_tokens == sum(i == seen().token_id for i in cut.input_ids)
    for limit in (first + 1, end - 1, end):  # nothing is left to learn
        with pytest.raises(FtcliError) as caught:
            prepared(path, max_seq_len=limit, overlong="truncate")
        assert caught.value.findings[0].code == "FT404"


def test_the_cache_knows_images_again_and_pixels_that_have_changed(tmp_path: Path) -> None:
    path = write(tmp_path, [{"images": ["a.png"], **chat(shown("q"), "a")}], {"a.png": picture()})
    cache = tmp_path / "cache"
    first, again = prepared(path, cache=cache), prepared(path, cache=cache)
    assert (first.from_cache, again.from_cache) == ((False,), (True,))
    assert first.sequences[0] == again.sequences[0]
    assert prepared(path, seen(max_pixels=256), cache).from_cache == (False,)
    (tmp_path / "a.png").write_bytes(picture(41, 30))
    with pytest.raises(FtcliError) as caught:
        PixelReader(seen(), torch.float32).of(again.sequences[:])
    assert codes(caught) == [("FT416", 1)]
    (tmp_path / "a.png").write_bytes(picture(seed=1))
    with pytest.raises(FtcliError, match="its content is another"):
        PixelReader(seen(), torch.float32).of(again.sequences[:])
    (tmp_path / "a.png").unlink()
    with pytest.raises(FtcliError) as caught:
        PixelReader(seen(), torch.float32).of(again.sequences[:])
    assert codes(caught) == [("FT416", 1)]


def test_a_changed_image_is_another_row_also_where_the_file_that_names_it_is_the_same(tmp_path: Path) -> None:
    """Nothing but the removal of the cache got such a run to start again."""
    rows = [{"images": [name], **chat(shown("q"), "a")} for name in ("a.png", "b.png")]
    path, cache = write(tmp_path, rows, {"a.png": picture(), "b.png": picture()}), tmp_path / "cache"
    prepared(path, cache=cache)
    (tmp_path / "a.png").write_bytes(picture(41, 30))
    changed = prepared(path, cache=cache)
    assert changed.from_cache == (False,)
    PixelReader(seen(), torch.float32).of(changed.sequences[:])
    assert prepared(path, cache=cache).from_cache == (True,)
    (tmp_path / "a.png").write_bytes(b"\x88PNG")
    with pytest.raises(FtcliError) as caught:
        prepared(path, cache=cache)
    assert codes(caught) == [("FT412", 1)]
    assert len(prepared(path, cache=cache, max_bad_rows=1).sequences) == 1
    (tmp_path / "a.png").write_bytes(picture())
    assert len(prepared(path, cache=cache, max_bad_rows=1).sequences) == 2


def test_digests_tell_rows_with_other_images_apart(tmp_path: Path) -> None:
    row = {"images": ["a.png"], **chat(shown("q"), "a")}
    one = prepared(write(tmp_path, [row], {"a.png": picture()})).sequences.digest()
    other = prepared(write(tmp_path, [row], {"a.png": picture(41, 30)})).sequences.digest()
    # Of one size in bytes, too: a run went on with the other.
    alike = [encoded(Image.new("RGB", (40, 30), colour), "BMP") for colour in ("red", "blue")]
    found = [prepared(write(tmp_path, [row], {"a.png": content})).sequences for content in alike]
    assert len({one, other, *(table.digest() for table in found)}) == 4
    assert [table[0].images[0].digest for table in found] == [shown_digest(content) for content in alike]


def test_fewer_pixels_are_fewer_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, [{"images": ["a.png"], **chat(shown("q"), "a")}], {"a.png": picture(200, 100)})
    counts = [prepared(path, seen(most)).sequences[0].image_tokens for most in (None, 2048, 512, 256)]
    assert counts == [8 * 2, 8, 2, 1] or counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


def test_pixels_are_the_same_however_many_read_them(tmp_path: Path) -> None:
    images = {f"{n}.png": picture(20 + 3 * n, 40, n) for n in range(12)}
    path = write(tmp_path, [{"images": [name], **chat(shown("q"), "a")} for name in images], images)
    rows = list(prepared(path).sequences)
    reader = PixelReader(seen(), torch.bfloat16, 6)
    alone = PixelReader(seen(), torch.bfloat16, 1).of(rows)
    for ahead in ([rows], [rows[::-1]], [rows[:5], rows[5:]], [rows[3:7]]):
        reader.ahead(ahead)
        found = reader.of(rows)
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], alone[name]) for name in found)
        assert found["pixel_values"].dtype == torch.bfloat16


def test_rows_of_one_length_make_tensors_that_can_be_page_locked(tmp_path: Path) -> None:
    """None of them is expanded: such rows were a bug's exit on a GPU, where they filled nothing up."""
    path = write(tmp_path, [{"images": ["a.png"], **chat(shown("q"), "a")}] * 2, {"a.png": picture()})
    rows = list(prepared(path).sequences)
    size = len(rows[0].input_ids)
    batch = {"input_ids": torch.zeros(2, size, dtype=torch.int64)}
    found = with_images(batch, [rows], PixelReader(seen(), torch.float32))
    assert found["position_ids"].shape == (1, size)
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_rows_are_encoded_alike_in_another_process(tmp_path: Path) -> None:
    """What an encoder holds can be sent."""
    import pickle

    (tmp_path / "a.png").write_bytes(picture())
    row = Row("rows", 1, {"images": ["a.png"], **chat(shown("q"), "a")}, str(tmp_path))
    data = DataConfig()
    encoder = Encoder(TOKENIZER, (int(TOKENIZER.eos_token_id),), data, "messages", seen())
    assert pickle.loads(pickle.dumps(encoder)).rows([row]).tokens == encoder.rows([row]).tokens


def test_an_earlier_answer_with_a_row_of_its_own_has_the_images_before_it(tmp_path: Path) -> None:
    """A template that drops the reasoning of earlier answers makes two rows; the first one has the first image."""
    template = TOKENIZER.chat_template
    assert isinstance(template, str)
    thinking = (
        "{{- message['content'].split('</think>')[-1] if not loop.last and message['role'] == 'assistant' "
        "else message['content'] -}}"
    )
    TOKENIZER.chat_template = template.replace("{{- message['content'] -}}", thinking, 1)
    rows = [{"images": ["a.png", "b.png"], **chat(shown("one"), "<think>so</think>yes", shown("two"), "no")}]
    try:
        found = prepared(write(tmp_path, rows, {"a.png": picture(), "b.png": picture(64, 16)})).sequences
    finally:
        TOKENIZER.chat_template = template
    assert [[image.grid for image in tokens.images] for tokens in found] == [[(2, 2)], [(2, 2), (1, 4)]]
    assert "<think>so</think>yes" in decoded(found[0])
    assert "<think>" not in decoded(found[1])


SPECIALS = {
    "gemma3": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "gemma4": ("<|image>", "<|image|>", "<image|>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "qwen3_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
}


@pytest.mark.parametrize("size", [(60, 60), (90, 40), (30, 170), (300, 290)])
@pytest.mark.parametrize("model_type", SPECIALS)
def test_images_are_written_as_transformers_processors_write_them(
    tmp_path: Path, model_type: str, size: tuple[int, int]
) -> None:
    specials = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *SPECIALS[model_type])
    write_tokenizer(tmp_path, "", specials)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    config = {
        "model_type": model_type,
        "mm_tokens_per_image": 9,
        "spatial_merge_size": 2,
        "boi_token_id": 5,
        "image_token_id": 6,
        "eoi_token_id": 7,
        "vision_config": {
            "patch_size": 14,
            "image_size": 42,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "pooling_kernel_size": 3,
        },
    }
    processor = processor_of(model_type, config)
    kind = named(TABLE[model_type], config, tokenizer)
    names = (kind.token, *(kind.ends or ()))
    first, *ends = tokenizer.convert_tokens_to_ids(list(names))
    vision = Vision(kind, processor, first, tuple(ends), config)
    image = Image.fromarray(np.zeros((size[1], size[0], 3), dtype=np.uint8))
    made = processor([image], return_tensors="pt")
    text = f"a{kind.placeholder}b"
    wanted = tokenizer(text.replace(kind.placeholder, _own(model_type, processor, made, config)))["input_ids"]
    ids = tokenizer(vision.written(text))["input_ids"]
    measured = vision.looked_at(_source(image), Row("rows", 1, {}))
    assert vision.expanded(TokenizedRow(Row("rows", 1, {}), ids, ids), [measured]).input_ids == wanted


def _source(image: Image.Image) -> Any:
    from ftcli.rows.row import ImageSource

    return ImageSource(content=encoded(image))


def _own(model_type: str, processor: Any, made: Any, config: dict[str, Any]) -> str:
    """What transformers' processor puts in an image's place, from what the image processor has made."""
    if model_type == "gemma3":
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        tokens = dict(zip(("boi_token", "image_token", "eoi_token"), SPECIALS["gemma3"], strict=True))
        sequence = f"\n\n{tokens['boi_token']}{tokens['image_token'] * 9}{tokens['eoi_token']}\n\n"
        return str(Gemma3Processor.replace_image_token(SimpleNamespace(full_image_sequence=sequence), made, 0))
    if model_type == "gemma4":
        from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

        before, token, behind = SPECIALS["gemma4"]
        own = SimpleNamespace(boi_token=before, image_token=token, eoi_token=behind)
        return str(Gemma4Processor.replace_image_token(own, made, 0))
    if model_type == "mistral3":
        token, line_end, end = SPECIALS["mistral3"]  # its processor cannot be imported without torchvision
        high, wide = (int(side) // 28 for side in made["image_sizes"][0])
        return line_end.join([token * wide] * high) + end
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    own = SimpleNamespace(image_processor=processor, image_token="<|image_pad|>")
    return str(Qwen3VLProcessor.replace_image_token(own, made, 0))


def test_positions_go_on_behind_the_larger_side() -> None:
    vision = seen()
    image = replace(vision.looked_at(_source(Image.new("RGB", (64, 32))), Row("rows", 1, {})), grid=(2, 4))
    tokens = vision.expanded(TokenizedRow(Row("rows", 1, {}), [9, vision.token_id, 9, 9], [9] * 4), [image])
    assert vision.positions(tokens).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 5, 6],
        [0, 1, 1, 1, 1, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6],
    ]
    assert vision.block_ends(tokens).tolist() == [1, 9, 9, 9, 9, 9, 9, 9, 9, 10, 11]


def test_what_is_done_with_images_is_told(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = Image.new("RGB", (30, 40))
    images = {
        "turned.jpg": encoded(pixels, "JPEG", exif=exif),
        "moving.gif": encoded(pixels, "GIF", save_all=True, append_images=[Image.new("RGB", (30, 40), "red")]),
        "ink.jpg": encoded(pixels.convert("CMYK"), "JPEG"),
        "photo.png": encoded(pixels, "JPEG"),
    }
    path = write(tmp_path, [{"images": [name], **chat(shown("q"), "a")} for name in images], images)
    found = prepared(path)
    told = next(finding.message for finding in found.findings if finding.code == "FT445")
    for words in ("1 images are turned", "1 animated", "1 images become RGB", "1 images have the ending"):
        assert words in told
    assert [image.width for tokens in found.sequences for image in tokens.images] == [40, 30, 30, 30]


def test_images_in_parquet_are_bytes_or_the_struct_of_datasets(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"images": [{"bytes": picture(), "path": "a.png"}], **chat(shown("one"), text("yes"))},
        {"images": [{"bytes": picture(64, 16), "path": None}], **chat(shown("two"), text("no"))},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = prepared(str(tmp_path / "rows.parquet"))
    assert [[image.grid for image in tokens.images] for tokens in found.sequences] == [[(2, 2)], [(1, 4)]]
    read = PixelReader(seen(), torch.float32).of(list(found.sequences))
    assert read["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 8]]
    data = DataConfig.model_validate({"train": [str(tmp_path / "rows.parquet")], "max_seq_len": 256})
    budget, stops = TimeBudget(60), (int(TOKENIZER.eos_token_id),)
    looking = RowSurvey(data, TOKENIZER, budget, cache_dir=None, reporter=SilentReporter(), vision=seen())
    table = looking.rows("data.train", data.train, stops)
    assert table is not None
    assert list(table) == list(found.sequences)


def test_processors_are_settled_as_transformers_processors_call_them(tmp_path: Path) -> None:
    """Pixtral's patches are merged by twos; Gemma-3's images are not cropped."""
    config = {"model_type": "mistral3", "vision_config": {"patch_size": 14}, "spatial_merge_size": 2}
    for name, settings in (("mistral3", config), ("gemma3", {"model_type": "gemma3"})):
        specials = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", *SPECIALS[name])
        write_tokenizer(tmp_path / name, "", specials)
        kind = "Pixtral" if name == "mistral3" else "Gemma3"
        own = {"image_processor_type": f"{kind}ImageProcessor", "do_pan_and_scan": True}
        own |= {"size": {"longest_edge": 300}, "patch_size": 14} if kind == "Pixtral" else {}
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(own))
        model, tokenizer = (
            ModelConfig(name_or_path=str(tmp_path / name)),
            AutoTokenizer.from_pretrained(tmp_path / name),
        )
        vision = load_vision(model, settings, tokenizer, None, offline=True)
        assert not isinstance(vision, str), vision
        image = Image.new("RGB", (420, 130))
        made = vision.of_pixels([image])
        grid = vision.looked_at(_source(image), Row("rows", 1, {})).grid
        assert len(made["pixel_values"]) == 1
        if name == "mistral3":
            assert [side // 28 for side in made["image_sizes"][0]] == list(grid)
            assert all(side % 28 == 0 for side in made["image_sizes"][0])


def test_a_row_with_images_is_not_made_into_pieces(tmp_path: Path) -> None:
    path = write(tmp_path, [{"images": ["a.png"], **chat(shown("q"), "a" * 90)}], {"a.png": picture()})
    with pytest.raises(FtcliError) as caught:
        prepared(path, max_seq_len=64, overlong="split", loss_on="all")
    assert codes(caught) == [("FT431", 1)]
    assert "none of rows with images" in caught.value.findings[0].message
