"""Generated text tasks: what the bundled tiny model was pre-trained on, and what the smoke recipes teach it.

`python docs/tools/synthetic.py pretrain --rows 30000 --out train.jsonl.gz` writes chat rows; `mirror` and `pick`
write the rows of the smoke recipes. Everything follows from the seed. Whether a prompt is held out follows from the
prompt alone (`held_out`), so a training file and an evaluation file share no prompt, whatever their seeds and sizes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnprstvwz"

#: One prompt in this many is held out for evaluation.
HELD_OUT_ONE_IN = 20

#: Longest training row of pre-training, in tokens of the byte-level tokenizer with its chat template.
ROW_TOKENS = 96

#: What the chat template adds to one exchange: `<start_of_turn>user\n`, `<end_of_turn>\n`, `<start_of_turn>model\n` and
#: `<end_of_turn>\n`, where each special token is one and each letter is one.
TEMPLATE_TOKENS = 17

Row = dict[str, object]


@dataclass(frozen=True)
class Exchange:
    """One prompt and the answer that is right for it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A kind of exchange. `draw` makes one from a random stream; `weight` is its share in the pre-training mixture."""

    weight: float
    draw: Callable[[Random], Exchange]


def held_out(prompt: str) -> bool:
    """Whether a prompt belongs to evaluation: a property of its text, independent of seed and order."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


# Material -----------------------------------------------------------------------------------------------------------


def _word(rng: Random, shortest: int = 2, longest: int = 8) -> str:
    """A word of random letters, or (every other time) of syllables that can be spoken."""
    length = rng.randint(shortest, longest)
    if rng.random() < 0.5:
        return "".join(rng.choice(LETTERS) for _ in range(length))
    first = rng.randrange(2)
    return "".join(rng.choice(VOWELS if (n + first) % 2 else CONSONANTS) for n in range(length))


def _digits(rng: Random, shortest: int = 2, longest: int = 4) -> list[int]:
    return rng.sample(range(10), rng.randint(shortest, longest))


def _line(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


# Operations on one word ---------------------------------------------------------------------------------------------


def _following(letter: str) -> str:
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


WORD_OPERATIONS: Mapping[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "upper": str.upper,
    "dashes": "-".join,
    "brackets": lambda word: f"[{word}]",
    "twice": lambda word: f"{word} {word}",
    "sort": lambda word: "".join(sorted(word)),
    "next": lambda word: "".join(map(_following, word)),
    "consonants": lambda word: "".join(letter for letter in word if letter not in VOWELS) or "none",
    "first": lambda word: word[0],
    "last": lambda word: word[-1],
    "length": lambda word: str(len(word)),
}

#: Pairs of operations that pre-training shows together, applied from left to right.
PAIRS = (
    ("reverse", "upper"),
    ("reverse", "dashes"),
    ("reverse", "brackets"),
    ("upper", "dashes"),
    ("upper", "brackets"),
    ("dashes", "brackets"),
    ("next", "upper"),
)

#: Other words for the same operation; `{}` is the word.
PHRASES: Mapping[str, tuple[str, ...]] = {
    "copy": ("copy: {}", "say {}"),
    "reverse": ("reverse: {}", "write {} backwards"),
    "upper": ("upper: {}", "write {} in capitals"),
    "dashes": ("dashes: {}", "spell {}"),
    "brackets": ("brackets: {}", "put {} in brackets"),
    "first": ("first: {}", "first letter of {}"),
    "last": ("last: {}", "last letter of {}"),
    "length": ("length: {}", "how long is {}"),
    "next": ("next: {}", "shift {} by one"),
}


def _word_task(name: str) -> Callable[[Random], Exchange]:
    phrases = PHRASES.get(name, (f"{name}: {{}}",))
    operation = WORD_OPERATIONS[name]

    def draw(rng: Random) -> Exchange:
        word = _word(rng)
        return Exchange(rng.choice(phrases).format(word), operation(word))

    return draw


def _pair(rng: Random) -> Exchange:
    first, second = rng.choice(PAIRS)
    word = _word(rng)
    return Exchange(f"{first} {second}: {word}", WORD_OPERATIONS[second](WORD_OPERATIONS[first](word)))


# Two words, letters, numbers ----------------------------------------------------------------------------------------


def _swap(rng: Random) -> Exchange:
    one, other = _word(rng, 2, 5), _word(rng, 2, 5)
    return Exchange(f"swap: {one} {other}", f"{other} {one}")


def _join(rng: Random) -> Exchange:
    one, other = _word(rng, 2, 5), _word(rng, 2, 5)
    return Exchange(f"join: {one} {other}", one + other)


def _max(rng: Random) -> Exchange:
    numbers = _digits(rng)
    return Exchange(f"max: {_line(numbers)}", str(max(numbers)))


def _min(rng: Random) -> Exchange:
    numbers = _digits(rng)
    return Exchange(f"min: {_line(numbers)}", str(min(numbers)))


def _after(rng: Random) -> Exchange:
    number = rng.randrange(1000)
    return Exchange(f"after {number}", str(number + 1))


def _pick(rng: Random) -> Exchange:
    """Noise on purpose: the first of four numbers in half of the cases, else any other, whatever their size.

    So the model's own choice is clear (the first) and right for the GRPO task in a quarter of the cases, while sampling
    still tries every number.
    """
    numbers = _digits(rng, 4, 4)
    return Exchange(f"pick: {_line(numbers)}", str(rng.choice([numbers[0], numbers[0], *numbers])))


#: The pre-training mixture. The smoke task (`mirror`) is not in it.
PRETRAINING: Mapping[str, Task] = {
    **{name: Task(1.0, _word_task(name)) for name in WORD_OPERATIONS},
    "reverse": Task(2.0, _word_task("reverse")),
    "sort": Task(2.0, _word_task("sort")),
    "first": Task(0.5, _word_task("first")),
    "last": Task(0.5, _word_task("last")),
    "pair": Task(4.0, _pair),
    "swap": Task(1.0, _swap),
    "join": Task(1.0, _join),
    "max": Task(1.0, _max),
    "min": Task(1.0, _min),
    "after": Task(0.5, _after),
    "pick": Task(1.0, _pick),
}


# Rows ---------------------------------------------------------------------------------------------------------------


def mirror(rng: Random) -> Exchange:
    """The smoke task: a word, then the same word backwards. New to the model, but made of two things it can do."""
    word = _word(rng, 3, 6)
    return Exchange(f"mirror: {word}", word + word[::-1])


def pick_largest(rng: Random) -> Exchange:
    """The GRPO task: pre-training's `pick`, of which only the largest number is now right."""
    prompt = _pick(rng).prompt
    return Exchange(prompt, max(prompt.removeprefix("pick: ").split()))


def pick_pair(rng: Random, exchange: Exchange) -> Row:
    """The preference task: the largest number of a `pick` is chosen, another one of its numbers is rejected."""
    others = [n for n in exchange.prompt.removeprefix("pick: ").split() if n != exchange.answer]
    asked, answered = _messages(exchange)
    return {"prompt": [asked], "chosen": [answered], "rejected": [{**answered, "content": rng.choice(others)}]}


#: The tools of ftcli/assets/environments/desk.py, as a row has them.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
    for name, description in (("calc", "Computes."), ("find", "Looks up."))
]
NOTES = Path(__file__).parents[2] / "ftcli" / "assets" / "environments" / "garden.txt"


def desk(rng: Random) -> Exchange:
    """The task with tools: a sum to compute, or a word to look up."""
    if rng.random() < 0.5:
        a, b, sign = rng.randint(1, 99), rng.randint(1, 99), rng.choice("+-*")
        return Exchange(f"{a}{sign}{b}", str({"+": a + b, "-": a - b, "*": a * b}[sign]))
    name, colour = rng.choice(NOTES.read_text(encoding="utf-8").splitlines()).split(": ")
    return Exchange(name, colour)


def call_rows(rng: Random, count: int) -> Iterator[Row]:
    """Conversations that show how tools are called and their answers handed on, and nothing of which is the right one:
    it is drawn, and what it answers is, too.
    """
    for _ in range(count):
        asked = draw(desk, rng, evaluation=False).prompt if rng.random() < 0.7 else _word(rng)
        told = rng.choice((_word(rng, 2, 7), str(rng.randint(-99, 9999)), draw(desk, rng, evaluation=False).answer))
        name = rng.choice(("calc", "find"))
        call = {"type": "function", "function": {"name": name, "arguments": {"text": asked}}}
        yield {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": name, "content": told},
                {"role": "assistant", "content": told},
            ],
            "tools": TOOLS,
        }


def draw(task: Callable[[Random], Exchange], rng: Random, *, evaluation: bool) -> Exchange:
    """One exchange from the training or the evaluation side of the split."""
    while True:
        exchange = task(rng)
        if held_out(exchange.prompt) == evaluation:
            return exchange


def _mixture(rng: Random) -> Exchange:
    tasks = list(PRETRAINING.values())
    return rng.choices(tasks, [task.weight for task in tasks])[0].draw(rng)


def pretraining_rows(rng: Random, count: int, *, evaluation: bool) -> Iterator[Row]:
    """`count` rows in the `messages` format.

    Training rows hold as many exchanges as fit into `ROW_TOKENS`, so that a batch wastes little on padding; evaluation
    rows hold one, so that each is judged by itself.
    """
    waiting: Exchange | None = None
    for _ in range(count):
        first = waiting or draw(_mixture, rng, evaluation=evaluation)
        exchanges, tokens, waiting = [first], 1 + _tokens(first), None
        while not evaluation:
            candidate = draw(_mixture, rng, evaluation=evaluation)
            tokens += _tokens(candidate)
            if tokens > ROW_TOKENS:
                waiting = candidate
                break
            exchanges.append(candidate)
        yield {"messages": [message for exchange in exchanges for message in _messages(exchange)]}


def task_rows(task: Callable[[Random], Exchange], rng: Random, count: int, *, evaluation: bool) -> list[Exchange]:
    """`count` exchanges of one task with different prompts.

    Raises ValueError when the task does not have that many.
    """
    found: dict[str, Exchange] = {}
    for _ in range(200 * count):
        exchange = draw(task, rng, evaluation=evaluation)
        found.setdefault(exchange.prompt, exchange)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"the task has fewer than {count} different prompts on this side of the split")


def rows(kind: str, count: int, seed: int, *, evaluation: bool) -> Iterator[Row]:
    """The rows of one dataset: `pretrain` and `mirror` as chats, `pick` as prompts with an `answer` for the reward,
    `pairs` as preference pairs of the same prompts; `calls` as conversations with tools, and `desk` as prompts with an
    `answer` that tools lead to.
    """
    rng = Random(f"{kind} {'evaluation' if evaluation else 'training'} {seed}")
    if kind == "pretrain":
        yield from pretraining_rows(rng, count, evaluation=evaluation)
    elif kind == "mirror":
        for exchange in task_rows(mirror, rng, count, evaluation=evaluation):
            yield {"messages": _messages(exchange)}
    elif kind == "calls":
        yield from call_rows(rng, count)
    elif kind == "desk":
        for exchange in (draw(desk, rng, evaluation=evaluation) for _ in range(count)):
            yield {"prompt": [_messages(exchange)[0]], "answer": exchange.answer}
    elif kind == "pairs":
        for exchange in task_rows(pick_largest, rng, count, evaluation=evaluation):
            yield pick_pair(rng, exchange)
    else:
        for exchange in task_rows(pick_largest, rng, count, evaluation=evaluation):
            yield {"prompt": exchange.prompt, "answer": exchange.answer}


def _tokens(exchange: Exchange) -> int:
    return len(exchange.prompt) + len(exchange.answer) + TEMPLATE_TOKENS


def _messages(exchange: Exchange) -> list[dict[str, str]]:
    return [{"role": "user", "content": exchange.prompt}, {"role": "assistant", "content": exchange.answer}]


def write_rows(path: Path, content: Iterator[Row]) -> None:
    """Write JSON Lines, compressed if the name ends in `.gz`: the same rows always give the same bytes of text."""
    text = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in content).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def main(arguments: list[str] | None = None) -> None:
    """Write one dataset as the command line says."""
    parser = argparse.ArgumentParser(prog="python docs/tools/synthetic.py", description=__doc__)
    parser.add_argument("kind", choices=("pretrain", "mirror", "pick", "pairs", "calls", "desk"))
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluation", action="store_true", help="write held-out prompts")
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl or .jsonl.gz file")
    options = parser.parse_args(arguments)
    write_rows(options.out, rows(options.kind, options.rows, options.seed, evaluation=options.evaluation))


if __name__ == "__main__":
    main()
