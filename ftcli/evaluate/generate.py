"""Batched generation from prompts, cached, in the recipe's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ftcli.config import GenerateConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.evaluate.batching import in_batches
from ftcli.facts.precision import DtypePlan
from ftcli.model.backbone import compute_context
from ftcli.model.finite import NotFinite, finite_logits
from ftcli.reporting import Reporter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def generate(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    config: GenerateConfig,
    *,
    batch_size: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
    stops: Sequence[int],
    max_length: int | None = None,
) -> list[str]:
    """One completion for each prompt text, special tokens removed, in the order given.

    Args:
        max_length: Most tokens of a prompt and its completion, which ends there; how many did is told. Every prompt is
            shorter.

    The longest prompts come first. A batch that does not fit into memory is halved, with the warning FT764.

    Raises:
        FtcliError: FT761 (exit 5) when one prompt alone does not fit, FT762 (exit 6) when the model's logits are not
            finite.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    completions = [""] * len(prompts)

    ended = 0

    def step(chosen: Sequence[int]) -> tuple[list[str], int]:
        texts = [prompts[i] for i in chosen]
        return _complete(model, tokenizer, texts, config, plan, device, stops, max_length)

    with answering(model), reporter.progress(len(prompts), "generating") as progress:
        for chosen, (texts, cut) in in_batches(
            order, batch_size, step, where=lambda i: None, reporter=reporter, what="generation"
        ):
            for index, text in zip(chosen, texts, strict=True):
                completions[index] = text
            ended += cut
            progress.advance(len(chosen))
    if ended:
        reporter.warn(f"{ended:,} of {len(prompts):,} answers were ended by data.max_seq_len {max_length}")
    return completions


@contextmanager
def answering(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A block in which ``model`` generates, in evaluation mode.

    Raises FtcliError FT762 (exit 6) when its logits are not finite.
    """
    was_training = model.training
    model.eval()
    try:
        with finite_logits(model):
            yield
    except NotFinite as error:
        raise FtcliError.single(
            "FT762",
            "the model's logits are not finite, so it has no answers",
            exit_code=ExitCode.DIVERGED,
            help="take an earlier checkpoint (--checkpoint STEP), or train again with a lower train.learning_rate",
        ) from error
    finally:
        model.train(was_training)


def tokens_of(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], device: torch.device) -> BatchEncoding:
    """Rendered prompts as ``input_ids`` and ``attention_mask``, int64 of (rows, tokens), padded on the left.

    So every answer begins at the same place; the mask keeps the padding out of attention.
    """
    return tokenizer(
        list(texts),
        add_special_tokens=False,
        padding=True,
        padding_side="left",
        return_attention_mask=True,  # some tokenizers' configs leave it out
        return_tensors="pt",
    ).to(device)


def router_logits_off(model: PreTrainedModel | PeftModel) -> dict[str, bool]:
    """A config may ask for the router's logits in every call; with a cache, transformers fails on them."""
    asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    return {"output_router_logits": False} if asked else {}


def _complete(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    config: GenerateConfig,
    plan: DtypePlan,
    device: torch.device,
    stops: Sequence[int],
    max_length: int | None,
) -> tuple[list[str], int]:
    """The completions, and how many of them ``max_length`` has ended."""
    batch = tokens_of(tokenizer, texts, device)
    sampling = {"do_sample": True, "temperature": config.temperature} if config.do_sample else {"do_sample": False}
    rooms = [config.max_new_tokens] * len(texts)
    if max_length is not None:
        rooms = [min(config.max_new_tokens, max_length - int(n)) for n in batch["attention_mask"].sum(dim=1).tolist()]
    with compute_context(device, plan.compute, plan.autocast):
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max(rooms),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=list(stops),
            **sampling,
            **router_logits_off(model),
        )
    new = output[:, batch["input_ids"].shape[1] :].tolist()
    kept = [ids[:room] for ids, room in zip(new, rooms, strict=True)]
    ends = {*stops}
    cut = sum(room < config.max_new_tokens and not ends & set(ids) for ids, room in zip(kept, rooms, strict=True))
    return [str(text) for text in tokenizer.batch_decode(kept, skip_special_tokens=True)], cut
