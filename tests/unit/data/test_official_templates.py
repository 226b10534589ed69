"""What is trained is what generation sees, under every official template that TRL's package has.

The oracle is plain transformers: the tokens before each trained answer are those of the generation prompt for its
history, and the answer ends with the first token at which generation stops.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ftcli.config.data import DataConfig
from ftcli.data.answers import with_reasoning
from ftcli.data.encode import Encoder
from ftcli.labels import IGNORE_INDEX
from ftcli.rows.row import Row
from tests.tiers import in_turn
from tests.unit.data.official import FOLDER, NAMES, Official

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TWO = [user("q one"), assistant("first answer"), user("q two"), assistant("second answer")]
AGENT = [
    user("Rain?"),
    assistant("", tool_calls=[CALL]),
    {**RESULT, "content": '{"sky": "sun"}'},
    assistant("No rain."),
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": TWO[:2],
    "two": TWO,
    "system": [{"role": "system", "content": "Be brief, sir."}, *TWO],
    "tool": [*AGENT[:2], {**RESULT, "content": "sunny all day"}, AGENT[3]],
    "json": [*AGENT, user("thanks"), assistant("welcome")],
    "reasoning": [
        user("q"),
        assistant("a", reasoning_content="I think"),
        user("r"),
        assistant("b", reasoning_content="Hm"),
    ],
    "thinking": [user("q"), assistant("<think>\nI think\n</think>\n\na"), *TWO[2:]],
    "empty": [user("q one"), assistant("")],
    "line break": [user("q one"), assistant("\nlisted below")],
    "long": [m for n in range(8) for m in (user(f"question {n} {'x' * 60}"), assistant(f"answer {n} {'y' * 50}"))],
}
#: Templates of models for images take no content but lists of parts.
OF_PARTS = ("idefics3", "llava_next", "smolvlm")
#: A template that cannot say something refuses it; these are the reasons that a row may be told.
REFUSED = {
    "system": {"gemma": "FT422"},
    "tool": dict.fromkeys(("cohere", "cohere2", "llava_next"), "FT425")
    | dict.fromkeys(("gemma", "gemma3"), "FT422")
    | dict.fromkeys(("deepseek_r1_distill", "deepseekv3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl"), "FT426")
    | dict.fromkeys(("idefics3", "smolvlm"), "FT426"),
    "reasoning": dict.fromkeys(
        [
            "cohere",
            "cohere2",
            "gemma",
            "gemma3",
            "gemma4",
            "gemma4_v2",
            "gemma4_v3",
            "gemma4_v4",
            "lfm2",
            "lfm2_v2",
            "llama3",
            "llama3_1",
            "llama3_2",
            "phi3",
            "phi3_5",
            "qwen2_5",
            "qwen2_5_vl",
            "qwen3_instruct_2507",
            "qwen3_vl",
            "idefics3",
            "llava_next",
            "smolvlm",
        ],
        "FT426",
    )
    | {"qwen3_5_nothink": "FT423"},
    "thinking": {"qwen3_5_nothink": "FT423"},
}
REFUSED["json"] = REFUSED["tool"]


@pytest.fixture(scope="module")
def official() -> Any:
    made: dict[str, Official] = {}

    def _official(name: str) -> Official:
        return made.setdefault(name, Official(name)) if name not in made else made[name]

    return _official


@pytest.mark.parametrize(("name", "kind"), in_turn(NAMES, list(CHATS), whole=("qwen2_5", "llama3_1", "qwen3")))
def test_what_is_trained_is_what_generation_sees(official: Any, name: str, kind: str) -> None:
    template, chat = official(name), CHATS[kind]
    tools = TOOLS if kind in ("tool", "json") else None
    read = template.read({"messages": chat, **({"tools": tools} if tools else {})})
    expected = REFUSED.get(kind, {}).get(name)
    assert [finding.code for finding in read.findings] == ([expected] if expected else [])
    if expected:
        return
    prompts = [
        template.prompt(_as_it_takes_them(name, chat[:n]), tools)
        for n, m in enumerate(chat)
        if m["role"] == "assistant"
    ]
    answers = []
    for tokens in read.tokens:
        labels = [*tokens.labels, IGNORE_INDEX]
        starts = [n for n in range(1, len(labels)) if labels[n] != IGNORE_INDEX == labels[n - 1]]
        for start in starts:
            end = labels.index(IGNORE_INDEX, start)
            assert tokens.input_ids[:start] in prompts
            assert [n for n in range(start, end) if labels[n] in template.stops] == [end - 1]
            answers.append(prompts.index(tokens.input_ids[:start]))
    assert sorted(answers) == list(range(len(prompts)))


def _as_it_takes_them(name: str, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reasoning under each key that some template reads; contents as parts for those that need them."""
    if name in OF_PARTS:
        return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]
    thoughts = [m.get("reasoning_content") for m in chat]
    return [
        {**m, "thinking": thought, "reasoning": thought} if thought else m
        for m, thought in zip(chat, thoughts, strict=True)
    ]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3", "phi3", "qwen3_instruct_2507", "lfm2_2_5"])
def test_where_history_is_kept_the_ids_are_the_templates_own(official: Any, name: str) -> None:
    template = official(name)
    (tokens,) = template.read({"messages": TWO}).tokens
    text = template.tokenizer.apply_chat_template(TWO, tokenize=False)
    assert tokens.input_ids == template.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_qwen3_trains_an_earlier_answer_in_a_row_of_its_own(official: Any) -> None:
    template = official("qwen3")
    read = template.read({"messages": TWO})
    thought = "<think>\n\n</think>\n\n"
    assert template.trained(read) == [[f"{thought}first answer<|im_end|>"], [f"{thought}second answer<|im_end|>"]]
    assert read.counts["turns_split"] == 1
    assert "<think>" not in template.tokenizer.decode(read.tokens[1].input_ids).partition("q two")[0]


def test_only_the_last_turn_is_needed_where_only_it_is_trained(official: Any) -> None:
    for name in ("qwen3", "gptoss", "deepseekv3"):
        template = official(name)
        for layout, fields in (
            ("messages", {"messages": TWO}),
            ("prompt_completion", {"prompt": TWO[:3], "completion": TWO[3:]}),
        ):
            read = template.read(fields, layout, loss_on="completion")
            (row,) = template.trained(read)
            assert "second answer" in row[0]
            assert "turns_split" not in +read.counts


def test_history_last_counts_the_answers_that_it_leaves_out(official: Any) -> None:
    template = official("qwen3")
    read = template.read({"messages": CHATS["long"]}, history="last")
    assert [len(row) for row in template.trained(read)] == [1]
    assert read.counts["turns_untrained"] == 7


def test_history_template_writes_the_training_form_in_one_row(official: Any) -> None:
    template = official("qwen3")
    read = template.read({"messages": TWO}, history="template")
    (tokens,) = read.tokens
    form = (FOLDER / "qwen3_training.jinja").read_text(encoding="utf-8")
    encoded = template.tokenizer.apply_chat_template(
        TWO, chat_template=form, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokens.input_ids == encoded["input_ids"]
    trained = [label != IGNORE_INDEX for label in tokens.labels]
    told = [bool(one) for one in encoded["assistant_masks"]]
    # TRL's mask ends with the line break after the stop token, which generation never writes.
    assert [(n, a, b) for n, (a, b) in enumerate(zip(trained, told, strict=True)) if a and not b] == []
    assert sum(told) - sum(trained) == 2


def test_glm_stops_at_the_role_that_comes_next(official: Any) -> None:
    template = official("glm4moe")
    (row,) = template.trained(template.read({"messages": TWO}))
    assert row == ["\n<think></think>\nfirst answer<|user|>", "\n<think></think>\nsecond answer<|user|>"]
    called = template.trained(template.read({"messages": AGENT, "tools": TOOLS}))[0]
    assert called[0].endswith("</tool_call><|observation|>")
    assert called[1].endswith("No rain.<|user|>")


def test_glm_trains_what_trls_training_form_trains(official: Any) -> None:
    """The two trained texts are those that TRL's mask has, which was written by others and by hand."""
    template = official("glm4moe")
    form = (FOLDER / "glm4moe_training.jinja").read_text(encoding="utf-8")
    encoded = template.tokenizer.apply_chat_template(
        TWO, chat_template=form, return_dict=True, return_assistant_tokens_mask=True
    )
    told = [i for i, one in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if one]
    (row,) = template.trained(template.read({"messages": TWO}))
    assert template.tokenizer.decode(told) == "".join(row)


def test_phi3_does_not_train_what_it_writes_after_the_end(official: Any) -> None:
    template = official("phi3")
    read = template.read({"messages": TWO})
    assert template.trained(read) == [["first answer<|end|>", "second answer<|end|>"]]
    assert template.tokenizer.decode(read.tokens[0].input_ids).endswith("<|end|>\n<|endoftext|>")


def test_deepseek_answers_after_the_reasoning_that_the_prompt_opens(official: Any) -> None:
    template = official("deepseekv3")
    read = template.read({"messages": TWO[:2]})
    assert template.trained(read) == [["\n</think>\n\nfirst answer<｜end▁of▁sentence｜>"]]
    assert template.tokenizer.decode(read.tokens[0].input_ids).endswith(
        "<｜Assistant｜><think>\n\n</think>\n\nfirst answer<｜end▁of▁sentence｜>"
    )
    thoughtful = template.trained(template.read({"messages": CHATS["thinking"][:2]}))
    assert thoughtful == [["I think\n</think>\n\na<｜end▁of▁sentence｜>"]]


def test_gpt_oss_ends_in_history_otherwise_than_as_the_last_turn(official: Any) -> None:
    template = official("gptoss")
    first, second = template.trained(template.read({"messages": TWO}))
    assert first == ["<|channel|>final<|message|>first answer<|return|>"]
    assert second == ["<|channel|>final<|message|>second answer<|return|>"]


def test_gpt_oss_shows_the_analysis_of_a_call_as_generation_did(official: Any) -> None:
    """The template drops it once a final answer follows; the prompt of that answer still had it."""
    template = official("gptoss")
    chat = [AGENT[0], assistant("", tool_calls=[CALL], thinking="I must look"), *AGENT[2:]]
    read = template.read({"messages": chat, "tools": TOOLS})
    assert read.findings == []
    (row,) = template.trained(read)
    assert row[0].startswith("<|channel|>analysis<|message|>I must look<|end|><|start|>assistant to=functions.weather")
    assert row[1] == "<|channel|>final<|message|>No rain.<|return|>"


def test_gpt_oss_trains_every_channel_up_to_what_stops_generation(official: Any) -> None:
    """Analysis, the call in the commentary, and the final answer, of earlier turns too; nothing that others wrote."""
    template = official("gptoss")
    chat = [
        {"role": "system", "content": "Be brief, sir."},
        AGENT[0],
        assistant("", tool_calls=[CALL], thinking="I must look"),
        AGENT[2],
        assistant("No rain.", thinking="sun it is"),
        user("thanks"),
        assistant("welcome", thinking="polite"),
    ]
    analysis, final = (
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        "<|channel|>final<|message|>{}<|return|>",
    )
    call = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>'
    wanted = [
        [analysis.format("I must look") + call, analysis.format("sun it is") + final.format("No rain.")],
        [analysis.format("polite") + final.format("welcome")],
    ]
    read = template.read({"messages": chat, "tools": TOOLS})
    assert read.findings == []
    assert template.trained(read) == wanted
    last = template.read({"messages": chat, "tools": TOOLS}, history="last")
    assert template.trained(last) == wanted[1:]
    effort = template.read({"messages": chat, "tools": TOOLS}, chat_template_kwargs={"reasoning_effort": "high"})
    assert template.trained(effort) == wanted
    for rows, word in ((read, "medium"), (effort, "high")):
        assert all(f"Reasoning: {word}" in template.tokenizer.decode(tokens.input_ids) for tokens in rows.tokens)


def test_qwen35_sees_after_the_opened_reasoning_what_generation_gives_it(official: Any) -> None:
    """The prompt's line break and the first one of an empty reasoning are one token where they are read together."""
    template = official("qwen3_5_think")
    (tokens,) = template.read({"messages": TWO[:2]}).tokens
    joint = template.tokenizer(template.tokenizer.decode(tokens.input_ids), add_special_tokens=False)["input_ids"]
    assert joint != tokens.input_ids
    start = next(n for n, label in enumerate(tokens.labels) if label != IGNORE_INDEX)
    assert tokens.input_ids[:start] == template.prompt(TWO[:1])
    assert template.tokenizer.decode(tokens.input_ids[start:]).startswith("\n</think>\n\nfirst answer")


def test_an_answer_is_not_taken_from_an_earlier_round_of_the_same_words(official: Any) -> None:
    """The prompt opens the reasoning with a line break, an empty answer has none: an earlier round agrees better."""
    template = official("nemotron_3_nano")
    rounds = [assistant("", tool_calls=[CALL], reasoning_content="look"), {**RESULT, "content": "ok"}]
    read = template.read({"messages": [user("q"), *rounds, *rounds, assistant("")]})
    texts = [text for row in template.trained(read) for text in row]
    assert len(texts) == 3
    assert texts[-1] == "</think><|im_end|>"
    assert all(text.count("<|im_end|>") == 1 for text in texts)


def test_gpt_oss_own_words_are_told_and_not_a_missing_role(official: Any) -> None:
    chat = [AGENT[0], assistant("a", tool_calls=[CALL], thinking="b"), *AGENT[2:]]
    (finding,) = official("gptoss").read({"messages": chat}).findings
    assert (finding.code, "Cannot pass both content and thinking" in finding.message) == ("FT422", True)


def test_an_encoder_goes_to_other_processes(official: Any) -> None:
    template = official("qwen3")
    config = DataConfig.model_validate({"train": ["x"]})
    encoder = Encoder(template.tokenizer, template.stops, config, "messages")
    rows = [Row("f", 1, {"messages": TWO})]
    first = encoder.batch(rows)
    second = pickle.loads(pickle.dumps(encoder)).batch(rows)
    assert first.encoded.ids.tolist() == second.encoded.ids.tolist()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("answer</s>", ("why\n</think>\n\nanswer</s>", True)),
        ("\n\nanswer</s>", ("why\n</think>\n\nanswer</s>", True)),
        ("</think>answer</s>", ("why\n</think>answer</s>", True)),
        ("<think>\nwhy\n</think>answer</s>", ("why\n</think>answer</s>", False)),
        ("why\n</think>\n\nanswer</s>", ("why\n</think>\n\nanswer</s>", False)),
    ],
)
def test_reasoning_is_added_once_and_only_where_a_template_hides_it(shown: str, expected: tuple[str, bool]) -> None:
    assert with_reasoning(shown, "why") == expected


def test_a_templates_own_switches_are_set(official: Any) -> None:
    template = official("qwen3_5_nothink")
    assert template.read({"messages": CHATS["reasoning"]}).findings[0].code == "FT423"
    read = template.read({"messages": CHATS["reasoning"]}, chat_template_kwargs={"enable_thinking": True})
    assert template.trained(read) == [["I think\n</think>\n\na<|im_end|>"], ["Hm\n</think>\n\nb<|im_end|>"]]
    with pytest.raises(ValueError, match="'tools' is decided by ftcli"):
        template.read({"messages": TWO}, chat_template_kwargs={"tools": "x"})
