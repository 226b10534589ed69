"""One recipe at work: its preflight report, with the tokenizer and the device that everything after preflight needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ftcli.config.recipe import Recipe
from ftcli.data.encode import TEXT_ALONE
from ftcli.data.pixels import PixelReader
from ftcli.data.reasoning import ReasoningMarks
from ftcli.data.template import Renderer, renderer_of
from ftcli.data.vision import Vision, load_vision
from ftcli.facts.model import ModelFacts
from ftcli.model.attention import is_ours
from ftcli.model.backbone import base_of
from ftcli.model.load import config_of
from ftcli.model.tokenizer import load_tokenizer, require_known_ids, stop_token_ids
from ftcli.plan.batches import Batches, choose_batches
from ftcli.plan.execution import OWN_ATTENTION
from ftcli.plan.memory.checkpointing import Offloaded
from ftcli.plan.precision import DtypePlan
from ftcli.plan.run import RunPlan
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Reporter, Session

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Job:
    """A command's work once preflight has passed. No weights yet.

    Attributes:
        report: What preflight found out; its recipe is the one that runs.
        session: Who is told what happens, and what may be used (network, cache).
        tokenizer: The recipe's, with the recipe's chat template. What is saved with it renders as it did in training.
        stops: Ids that end a turn.
        vision: What the model sees images with; or, as a clause, why rows with images are refused.
    """

    report: PreflightReport
    session: Session
    tokenizer: PreTrainedTokenizerBase
    stops: tuple[int, ...]
    vision: Vision | str = TEXT_ALONE

    @property
    def recipe(self) -> Recipe:
        """The recipe as it runs: nothing in it is left to be chosen."""
        return self.report.recipe

    @property
    def facts(self) -> ModelFacts:
        return self.report.facts

    @property
    def plan(self) -> RunPlan:
        """The plan of the run, made before anything was built."""
        return self.report.plan

    @property
    def dtypes(self) -> DtypePlan:
        return self.plan.dtypes

    @property
    def new_tokens(self) -> list[int]:
        """Ids of the recipe's own tokens."""
        return [int(self.tokenizer.convert_tokens_to_ids(token)) for token in self.recipe.model.add_tokens]

    @property
    def device(self) -> torch.device:
        return device_of(self.report)

    @property
    def reporter(self) -> Reporter:
        return self.session.reporter

    def batches(self, model: PreTrainedModel | PeftModel) -> Batches:
        """The layout of micro-batches: as planned, if ``model`` has the attention that was planned with."""
        planned = self.plan.execution.batches
        if planned.layout == "padded" or is_ours(base_of(model)):
            return planned
        return choose_batches(self.recipe.data.padding_free, takes_rows=None, masked_densely=OWN_ATTENTION)

    def pixel_reader(self) -> PixelReader | None:
        """A reader of the images of rows; None where the model sees none."""
        if isinstance(self.vision, str):
            return None
        return PixelReader(self.vision, getattr(torch, self.dtypes.parameter), pinned=self.device.type == "cuda")

    @property
    def pad_token_id(self) -> int:
        """The id that pads rows."""
        return int(self.tokenizer.pad_token_id)

    @property
    def reasoning_marks(self) -> ReasoningMarks:
        """Marks of reasoning under the recipe's chat template."""
        return ReasoningMarks(self.tokenizer, renderer_of(self.tokenizer, self.recipe.data).source)

    @property
    def vocab_size(self) -> int:
        """Ids that random tokens are drawn from."""
        return int(self.facts.vocab_size or 256)

    @property
    def offloaded(self) -> Offloaded:
        """The tensors that ``gradient_checkpointing: offload`` sends to the host, as preflight chose them."""
        memory = self.report.memory
        return (memory.offloaded if memory is not None else None) or "halves"


def device_of(report: PreflightReport) -> torch.device:
    """The torch device that preflight looked at."""
    return torch.device("cuda", 0) if report.device.kind == "cuda" else torch.device("cpu")


def open_job(report: PreflightReport, session: Session) -> Job:
    """Loads the tokenizer.

    Raises FtcliError as :func:`config_of` and :func:`ftcli.model.tokenizer.load_tokenizer`, and FT315 (exit 3) for a
    tokenizer that has more ids than the model.
    """
    recipe = report.recipe
    config_of(report.facts.raw)  # transformers reads it for the tokenizer as well, which is not at fault
    tokenizer = load_tokenizer(recipe.model, offline=session.offline)
    require_known_ids(tokenizer, report.facts, report.recipe.model.add_tokens)
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = Renderer(tokenizer, recipe.data.chat_template).source
    vision = vision_of(report, tokenizer, offline=session.offline)
    return Job(report, session, tokenizer, stop_token_ids(report.facts, tokenizer), vision)


def vision_of(report: PreflightReport, tokenizer: PreTrainedTokenizerBase, *, offline: bool) -> Vision | str:
    """The image processor of the recipe's model, where its method trains on images; else why not."""
    recipe, method = report.recipe, report.plan.method
    if not method.sees:
        return f"{method.title} trains on text alone"
    if recipe.launch.context_parallel_size > 1:
        return "processes that share rows (launch.context_parallel_size) take none"
    return load_vision(recipe.model, report.facts.raw, tokenizer, recipe.data.image_max_pixels, offline=offline)
