"""Measures how the rate of tokenizing, memory and start-up grow with the number of rows.

``python docs/tools/tokenizing.py 10000 100000 1000000`` prints a line for each: rows a second of CPU time with masks,
the same of transformers alone (``apply_chat_template``, then the tokenizer) on the first rows, the peak of the process'
memory before and after, and the seconds in which a second run finds the tokens in the cache.
``--windows`` before the numbers reads the same rows as `data.streaming` does, and prints the most that windows take on
the disk, and the peaks of this process and of the one that tokenizes.
The chats have one to three turns of words from docs/, the tokenizer is BPE of 16,000 pieces trained on the same, the
template is ChatML.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ftcli.assets import template_path
from ftcli.config.data import DataConfig, DatasetConfig, Window
from ftcli.data.encode import TEXT_ALONE
from ftcli.data.prepare import prepare
from ftcli.data.tokens import TokenStore
from ftcli.data.windows import WindowMaker, WindowProcess, WindowStart
from ftcli.units import size

DOCS = Path(__file__).parent.parent
#: Rows that transformers alone is measured on.
SOME = 10_000


def words() -> list[str]:
    return [word for page in sorted(DOCS.glob("*.md")) for word in page.read_text(encoding="utf-8").split()]


def tokenizer_of(pages: list[str]) -> PreTrainedTokenizerBase:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train(pages, trainers.BpeTrainer(vocab_size=16_000, special_tokens=specials, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.pad_token, tokenizer.eos_token = specials[0], specials[2]
    tokenizer.chat_template = template_path("chatml").read_text(encoding="utf-8")
    return tokenizer


def write_rows(path: Path, count: int) -> None:
    source, known = random.Random(0), words()
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            chat = []
            for _ in range(source.choice((1, 1, 2, 3))):
                chat.append({"role": "user", "content": " ".join(source.choices(known, k=source.randint(5, 25)))})
                chat.append({"role": "assistant", "content": " ".join(source.choices(known, k=source.randint(10, 40)))})
            stream.write(json.dumps({"messages": chat}) + "\n")


def plain_seconds(path: Path, tokenizer: PreTrainedTokenizerBase) -> float:
    """Seconds of CPU time a row that transformers takes alone, without masks."""
    with path.open(encoding="utf-8") as stream:
        chats = [json.loads(line)["messages"] for line in islice(stream, SOME)]
    begun = time.process_time()
    for at in range(0, len(chats), 256):
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats[at : at + 256]]
        tokenizer(texts, add_special_tokens=False)
    return (time.process_time() - begun) / len(chats)


def measured(count: int) -> str:
    """A line of the table, measured in this process."""
    tokenizer = tokenizer_of([str(page) for page in sorted(DOCS.glob("*.md"))])
    stops = [int(tokenizer.convert_tokens_to_ids("<|im_end|>"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, count)
        data = DataConfig.model_validate({"train": [str(path)], "max_seq_len": 2048, "num_proc": 1})
        plain = plain_seconds(path, tokenizer)
        before = _peak()
        begun = time.process_time()
        prepare(data.train, data, tokenizer, stops, cache_dir=Path(folder))
        ours = (time.process_time() - begun) / count
        begun = time.perf_counter()
        found = prepare(data.train, data, tokenizer, stops, cache_dir=Path(folder))
        cached = time.perf_counter() - begun
    assert found.from_cache == (True,)
    rates = f"{1 / ours:,.0f} | {1 / plain:,.0f}"
    return f"| {count:,} | {rates} | {size(before)} | {size(_peak())} | {cached:.2f} |"


def in_windows(count: int) -> str:
    """A line of the table of windows: each is taken as training takes it, and thrown away."""
    tokenizer = tokenizer_of([str(page) for page in sorted(DOCS.glob("*.md"))])
    stops = [int(tokenizer.convert_tokens_to_ids("<|im_end|>"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, count)
        source = DatasetConfig(path=str(path)).with_window(Window(0, BUFFER))
        data = DataConfig(train=(source,), streaming=True, buffer_size=BUFFER)
        maker = WindowMaker(data, tokenizer, stops, TEXT_ALONE, WindowStart(), offline=True)
        (Path(folder) / "windows").mkdir()
        process = WindowProcess(maker, Path(folder) / "windows", beside=True)
        rows = most = windows = 0
        begun = time.perf_counter()
        while rows < count:
            made = process.next()
            rows += len(TokenStore(made.folder / "0"))
            windows += 1
            most = max(most, sum(file.stat().st_size for file in process.folder.rglob("*") if file.is_file()))
            shutil.rmtree(made.folder)
        seconds = time.perf_counter() - begun
        process.end()
        held = path.stat().st_size
    peaks = f"{size(_peak())} | {size(_peak(resource.RUSAGE_CHILDREN))}"
    return f"| {count:,} | {size(held)} | {windows} | {size(most)} | {peaks} | {rows / seconds:,.0f} |"


def _peak(of: int = resource.RUSAGE_SELF) -> int:
    return resource.getrusage(of).ru_maxrss * 1024


#: Rows of a window, which is what `data.buffer_size` says where a recipe does not.
BUFFER = 16_384
WINDOWS = (
    "| rows | file | windows | most on the disk | peak here | peak beside | rows/s |\n|---|---|---|---|---|---|---|\n"
)
HEAD = "| rows | rows/s | transformers alone | peak before | peak | s from the cache |\n|---|---|---|---|---|---|\n"

if __name__ == "__main__":
    streams = "--windows" in sys.argv
    counts = [word for word in sys.argv[1:] if word != "--windows"]
    if len(counts) == 1:
        sys.stdout.write((in_windows if streams else measured)(int(counts[0])) + "\n")
    else:
        sys.stdout.write(WINDOWS if streams else HEAD)
        sys.stdout.flush()
        for rows in counts:  # each in a process of its own, whose peak is its own
            subprocess.run([sys.executable, __file__, *(["--windows"] if streams else []), rows], check=True)  # noqa: S603
