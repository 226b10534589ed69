"""Batched generation from prompts, cached, in the recipe's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ftcli.config import GenerateConfig
from ftcli.evaluate.batching import in_batches
from ftcli.facts.precision import DtypePlan
from ftcli.model.backbone import compute_context
from ftcli.reporting import Reporter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
) -> list[str]:
    """One completion for each prompt text, special tokens removed, in the order given.

    The longest prompts come first. A batch that does not fit into memory is halved, with the warning FT764; raises
    FtcliError FT761 (exit 5) when one prompt alone does not fit.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    completions = [""] * len(prompts)

    def step(chosen: Sequence[int]) -> list[str]:
        return _complete(model, tokenizer, [prompts[i] for i in chosen], config, plan, device, stops)

    was_training = model.training
    model.eval()
    try:
        with reporter.progress(len(prompts), "generating") as progress:
            for chosen, texts in in_batches(
                order, batch_size, step, where=lambda i: None, reporter=reporter, what="generation"
            ):
                for index, text in zip(chosen, texts, strict=True):
                    completions[index] = text
                progress.advance(len(chosen))
    finally:
        model.train(was_training)
    return completions


def _complete(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    config: GenerateConfig,
    plan: DtypePlan,
    device: torch.device,
    stops: Sequence[int],
) -> list[str]:
    # Padding on the left puts every answer at the same place; the mask keeps the padding out of attention.
    batch = tokenizer(list(texts), add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt").to(
        device
    )
    extra: dict[str, bool] = {}
    # A config may ask for the router's logits in every call; with a cache, transformers fails on them.
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        extra["output_router_logits"] = False
    sampling = {"do_sample": True, "temperature": config.temperature} if config.do_sample else {"do_sample": False}
    with compute_context(device, plan.compute, plan.autocast):
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=config.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=list(stops),
            **sampling,
            **extra,
        )
    new = output[:, batch["input_ids"].shape[1] :]
    return [str(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
