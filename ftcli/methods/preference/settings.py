"""The section ``preference``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ftcli.config.base import Fraction, Items, PathText, Rate, Section, Word
from ftcli.tables import preference_losses

LossName = Annotated[str, Word(preference_losses.names)]
LabelWeight = Annotated[float, Field(gt=0, le=1e6)]


class WeightedLoss(Section):
    """One loss of several."""

    name: LossName = Field(description="The loss.")
    weight: Annotated[float, Field(gt=0, le=1e6)] = Field(default=1.0, description="Its weight in the sum.")


class PreferenceConfig(Section):
    """Learning from pairs of a chosen and a rejected answer (`train.method`: dpo, orpo, simpo), or from answers that
    are called good or bad (kto).
    """

    loss: LossName | Items[WeightedLoss] | None = Field(
        default=None,
        description="The loss, or several with weights; when absent `sigmoid` under dpo, else the method's name. kto "
        "takes `kto` or `apo_zero_unpaired`.",
    )
    beta: Annotated[float, Field(gt=0, le=1e4)] | None = Field(
        default=None,
        description="Scale of what the loss compares; when absent the loss's own (sigmoid 0.1). Needed by `ipo` and "
        "`sigmoid_norm`, which compare nats a token.",
    )
    gamma: Annotated[float, Field(ge=0, le=1e4)] = Field(
        default=0.5, description="simpo: the lead that is asked of the chosen answer."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.0, description="Share of pairs taken to be the wrong way round (conservative DPO, robust)."
    )
    sft_weight: Rate = Field(
        default=0.0, description="Weight of the mean cross-entropy of the chosen answers' tokens, added to the loss."
    )
    use_weighting: bool = Field(
        default=False,
        description="Weighs each pair's loss by how likely its answers are for the trained model (WPO).",
    )
    desirable_weight: LabelWeight = Field(default=1.0, description="kto: weight of answers that are called good.")
    undesirable_weight: LabelWeight = Field(default=1.0, description="kto: weight of answers that are called bad.")
    kl_rows: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="kto: mismatched rows a step to estimate the KL from; when absent, as many as it has rows.",
    )
    ld_alpha: Fraction = Field(
        default=1.0,
        description="Weight of an answer's tokens beyond the length of the shorter one (LD-DPO); 1 counts all alike.",
    )
    reference: Literal["start", "none"] | PathText | None = Field(
        default=None,
        description="What log-probabilities are compared with: `start` is the model as training began, `none` nothing, "
        "else another model (`OWNER/NAME`, or a folder). When absent, what the loss needs.",
        examples=["start", "google/gemma-2-9b-it", "./my-model"],
    )
    reference_revision: str | None = Field(
        default=None, description="Branch, tag or commit of another model on the Hub that is the reference."
    )
    reference_cache: Literal["auto", "off"] | PathText = Field(
        default="auto",
        description="Log-probabilities of the reference, computed once: `auto` where that is cheaper; `off` computes "
        "them in each step; a folder (`./reference`) always keeps them there.",
    )
    share_prompts: Literal["auto", "off"] = Field(
        default="auto",
        description="`auto` computes the prompt of a pair once for both answers where attention's kernels can; loss "
        "and gradients are the same. `off` computes it with each.",
    )
