"""A recipe on a machine: everything that the memory of a run depends on, and the quantities that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from ftkernels.limits import log_prob_bytes

from ftcli.config.load import Settings
from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.config.recipe import Recipe
from ftcli.facts.adapters import LinearAdapter
from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import ModelFacts
from ftcli.facts.shape import ModelShape
from ftcli.plan.execution import Execution, Work, execution_of, most_graph_tokens, wants_kernels, why_no_graphs
from ftcli.plan.measured import MeasuredModel, MeasuredTower, measured_model, measured_tower, question_of
from ftcli.plan.memory.activations import ActivationSettings, LayerMemory, plain_layers
from ftcli.plan.memory.fused_activations import fused_layers
from ftcli.plan.precision import DTYPE_BYTES, DtypePlan, plan_dtypes
from ftcli.plan.quantization import trains_rounded
from ftcli.plan.trained import EMBEDDING, HEAD, TrainedParameters, adapters_of, trained_parameters
from ftcli.tables import code_of, optimizers, policies
from ftcli.tables.images import LANGUAGE
from ftcli.tables.methods import Method
from ftcli.tables.policies import Policy, PolicyName

#: A model's sizes: computed from its family's description, or measured (:attr:`RunPlan.described`).
Sizes: TypeAlias = ModelShape | MeasuredModel


@dataclass(frozen=True, slots=True)
class Generation:
    """One batch of generation: ``rows`` prompts of up to ``prompt`` tokens, continued up to ``seq_len`` tokens."""

    rows: int
    prompt: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class MethodMemory:
    """A training method's decisions about the memory of a step: its longest row in tokens, the workspace of its loss
    (None: that of ``ftkernels.linear_cross_entropy``), a second model that the trained one is compared with, and the
    batch that it generates between steps.
    """

    seq_len: int
    loss_bytes: int | None = None
    reference_bytes: int = 0
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class OtherModel:
    """Another model that a method asks, by the recipe's ``key`` that names it; quantized as the trained one is, or as
    ``quantization`` says.
    """

    key: str
    model: ModelConfig
    quantization: QuantizationConfig | None = None

    def in_place(self, recipe: Recipe) -> Recipe:
        """The recipe with it in the trained model's place."""
        return recipe.changed({"model": self.model, "quantization": self.quantization or recipe.quantization})


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run. The recipe must name a checkpointing policy, not ``auto``; ``device`` has no more memory than
    the run may use, and there are ``hosts`` like it.

    ``prompt_tokens`` are those that the rows of each pair at least have in common; ``other`` is another model that the
    method asks; ``sees``: the first rows have images.
    """

    recipe: Recipe
    facts: ModelFacts
    device: DeviceFacts
    work: Work
    method: Method
    hosts: int = 1
    graphs_fit: bool = True
    prompt_tokens: int = 0
    other: ModelFacts | None = None
    sees: bool = False

    @property
    def shape(self) -> ModelShape:
        """The model's shape; only where it is known."""
        assert self.facts.shape is not None
        return self.facts.shape

    @property
    def described(self) -> ModelShape | None:
        """The model's shape where memory is computed from it; None where it is measured: without a description, and
        where transformers' own code computes delta nets, latent attention, experts, or layers that differ in their
        heads.
        """
        shape = self.facts.shape
        own = not self.execution.on_kernels and self.work != "export"
        if shape is None or not own:
            return shape
        measured = shape.delta_nets or shape.latents or shape.has_experts or shape.family.global_heads
        return None if measured else shape

    @cached_property
    def measured(self) -> MeasuredModel:
        """The model as it is measured; takes seconds. Where nothing is computed from a description."""
        trains, classifier = self.trains, self.method.classifier
        question = question_of(
            self.recipe, self.facts, self.dtypes, self.execution, trains=trains, classifier=classifier
        )
        return measured_model(question)

    @property
    def sizes(self) -> Sizes:
        """The model's sizes, of every family."""
        return self.described or self.measured

    @property
    def model_bytes(self) -> int:
        """Bytes of another model like the trained one on each rank, sharded like it."""
        return -(-self.sizes.parameters // self.shard_size) * self.dtypes.parameter_bytes

    @property
    def trains(self) -> bool:
        return self.work == "train"

    @cached_property
    def dtypes(self) -> DtypePlan:
        return plan_dtypes(self.recipe, self.device)

    @cached_property
    def execution(self) -> Execution:
        """The code that runs each part."""
        return execution_of(self.recipe, self.facts, self.dtypes, self.device, work=self.work)

    @cached_property
    def why_no_graphs(self) -> str | None:
        """The reason why the layers are not launched as CUDA graphs; None if they are."""
        if not self.trains:
            return "nothing is trained"
        if self.facts.shape is None:
            return "the layers are not on Triton kernels"
        if not self.graphs_fit:
            return "there is no room for their memory"
        return why_no_graphs(self.recipe, self.facts, self.execution, tokens=self.tokens)

    @property
    def graphed(self) -> bool:
        """True if the layers are launched as CUDA graphs, in micro-batches of up to ``graph_tokens``."""
        return self.why_no_graphs is None

    @property
    def wholly_graphed(self) -> bool:
        """True if they are in every micro-batch, the largest included."""
        return self.graphed and self.graph_tokens == self.tokens

    @property
    def graph_tokens(self) -> int:
        """The most tokens that a graph takes."""
        most = most_graph_tokens(self.recipe, self.facts)
        return min(self.tokens, most) if most is not None else 0  # without a shape a step's tokens are not counted

    @cached_property
    def layers(self) -> LayerMemory:
        """Bytes that the layers' code keeps and allocates."""
        execution, beyond_sdpa = self.execution, self.facts.beyond_sdpa
        if not execution.on_kernels:
            return plain_layers("eager" if execution.attention == "eager" else "sdpa")
        return fused_layers(
            all_scores=beyond_sdpa and execution.dense == "eager",
            reference=execution.layers.code == "reference",
            attention_by_kernel=execution.sends_attention,
        )

    @property
    def stream(self) -> str:
        """Dtype of the residual stream: on the kernels that of the products, elsewhere as the embeddings give it."""
        return self.dtypes.compute if self.execution.on_kernels else self.dtypes.parameter

    @property
    def stream_bytes(self) -> int:
        """Bytes of one element of the residual stream."""
        return DTYPE_BYTES[self.stream]

    @property
    def own_optimizer(self) -> bool:
        """True if ftcli's own form of the recipe's optimizer is taken: only that reads gradients in bfloat16 for
        parameters in float32, rounds parameters in bfloat16, and keeps state for a shard.
        """
        needed = self.execution.on_kernels or self.dtypes.gradient != "float32" or self.shard_size > 1
        whole = self.recipe.lora is None and needed
        return whole and optimizers.row(self.recipe.train.optim).build_own is not None

    @property
    def optim(self) -> str:
        """The row of the optimizer that steps: the recipe's, or what takes its place on a GPU."""
        asked = self.recipe.train.optim
        on_gpu = self.device.kind == "cuda" and self.execution.on_kernels
        return (on_gpu and optimizers.row(asked).on_gpu) or asked

    @property
    def trains_language(self) -> bool:
        """True if the language model is among the parts that are trained."""
        return "language" in self.recipe.model.train

    @cached_property
    def tower(self) -> MeasuredTower | None:
        """Measurements of the parts that are trained beside the language model; None without any."""
        if not self.trains or self.recipe.model.train == LANGUAGE:
            return None
        return measured_tower(
            question_of(self.recipe, self.facts, self.dtypes, self.execution, trains=True, classifier=False)
        )

    @cached_property
    def trained(self) -> TrainedParameters:
        found = TrainedParameters(0, ())
        if self.trains_language:
            described = self.described is not None
            found = trained_parameters(self.recipe, self.shape) if described else self.measured.trained
        return found if self.tower is None else found.with_others(self.tower.trained)

    @cached_property
    def adapters(self) -> tuple[LinearAdapter, ...]:
        """The language model's adapters; none under full fine-tuning."""
        return adapters_of(self.recipe, self.shape) if self.trains_language else ()

    @cached_property
    def method_memory(self) -> MethodMemory:
        found: MethodMemory = code_of(self.method.memory)(self)
        return found

    @property
    def policy(self) -> Policy:
        return policies.row(self.recipe.train.checkpointing)

    @property
    def host_table_bytes(self) -> int:
        """Bytes of the embedding, and of the table of layers' own inputs, that lie in pinned host memory; 0 where both
        are on the device.
        """
        on_gpu = self.device.kind == "cuda" and self.execution.on_kernels and self.shard_size == 1
        if not (self.trains and on_gpu and self.policy.embedding_on_host):
            return 0
        lora, shape = self.recipe.lora, self.shape
        if lora is None:
            return 0
        rows = 0 if EMBEDDING in lora.modules_to_save or shape.tied else shape.vocab_size * shape.hidden_size
        if shape.layer_input is not None:
            rows += shape.layer_input.entries * shape.layer_input_features
        return rows * self.dtypes.parameter_bytes

    @property
    def uncheckpointed(self) -> int:
        """Number of layers that are left out of the policy and keep everything."""
        return min(self.recipe.train.uncheckpointed_layers, self.sizes.num_layers) if self.policy.by_layer else 0

    @property
    def ranks(self) -> int:
        """Processes that train together, each on a device of its own."""
        return self.recipe.launch.num_processes if self.trains else 1

    @property
    def shard_size(self) -> int:
        """Devices that the weights are sharded over; 1 where each has all of them."""
        return self.recipe.launch.shard_size if self.trains and self.recipe.launch.is_sharded else 1

    @property
    def rows(self) -> int:
        return self.recipe.train.per_device_train_batch_size * self.method.unit

    @property
    def largest(self) -> tuple[int, int]:
        """Rows and tokens of a row of a micro-batch at its largest."""
        return self.largest_shape(self.rows, self.method_memory.seq_len, once=self.rows // 2 * self.shared_tokens)

    @property
    def shared_tokens(self) -> int:
        """Tokens of each pair that are known to be computed once for both of its rows."""
        return self.prompt_tokens if self.trains and self.execution.batches.shares_prompts else 0

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch at its largest, with what it is rounded up by: this process's, where several share
        rows."""
        rows, width = self.largest
        return rows * -(-width // self.shares)

    @property
    def shares(self) -> int:
        """Processes that share each row in training."""
        return self.recipe.launch.context_parallel_size if self.trains else 1

    def largest_shape(self, rows: int, longest: int, *, once: int = 0) -> tuple[int, int]:
        """The largest (rows, width) that is computed for ``rows`` rows of up to ``longest`` tokens, ``once`` of which
        rows share. Unpadded, no mix of lengths takes more than full rows do: as one row, for which attention and
        rotation need most.
        """
        batches = self.execution.batches
        return (1, batches.most_tokens(rows, longest, once)) if batches.layout == "unpadded" else (rows, longest)

    def log_prob_bytes(self, rows: int) -> int:
        """Workspace of a loss that takes ``rows`` log-probabilities from hidden states, and the head where it is cast
        for them: sharded weights that are trained are all-gathered in the compute dtype.
        """
        shape, element = self.sizes, self.dtypes.compute_bytes
        on_gpu = self.device.kind == "cuda"
        needed = log_prob_bytes(rows, shape.hidden_size, shape.vocab_size, element, on_gpu=on_gpu)
        cast = self.dtypes.parameter_bytes != element or (self.dtypes.autocast and self.head_is_trained)
        if cast and (self.shard_size == 1 or self.recipe.lora is not None):
            needed += shape.vocab_size * shape.hidden_size * element
        return needed

    @property
    def head_is_trained(self) -> bool:
        """True if the head has a gradient."""
        lora = self.recipe.lora
        if self.method.classifier or not self.trains_language:
            return False
        return lora is None or HEAD in lora.modules_to_save

    def setting(self, seq_len: int, *, padded: bool) -> ActivationSettings:
        """Arguments of the activation terms. ``padded``: rows of a batch may differ in length. Where layers differ in
        their adapters, each counts as one that has all of them, with the largest rank.
        """
        lora = self.recipe.lora
        return ActivationSettings(
            seq_len=seq_len,
            bytes_residual=self.stream_bytes,
            bytes_compute=self.dtypes.compute_bytes,
            autocast=self.dtypes.autocast,
            adapted=tuple(dict.fromkeys(each.linear for each in self.adapters)),
            rank=max((each.rank for each in self.adapters), default=0),
            dropout=lora is not None and lora.dropout > 0,
            full=lora is None,
            dora=lora is not None and lora.use_dora,
            drops_residual=self.trains and self.facts.drops_residual,
            softcap=bool(self.facts.attn_logit_softcapping),
            padded=padded,
            rounds=self.rounds,
            squares_widened=self.dtypes.autocast and self.device.kind == "cuda" and self.facts.activation == "relu2",
            widens=self.dtypes.autocast and self.device.kind == "cuda",
            own_norms=self.rounds != "no" and self.recipe.quantization.use_rms_norm,
            exchanges=self.shares > 1,
        )

    @property
    def rounds(self) -> Literal["no", "apart", "in norms"]:
        """The form in which linear layers that are trained rounded keep their input."""
        if not trains_rounded(self.recipe):
            return "no"
        by_kernel = self.device.kind == "cuda" and wants_kernels(self.recipe.model.kernels)
        return "in norms" if by_kernel and self.shape.family.norm == "llama" else "apart"

    def on(self, device: DeviceFacts) -> RunPlan:
        """The same setup on another machine."""
        return replace(self, device=device)

    def changed(self, settings: Settings) -> RunPlan:
        """The same setup with dotted keys of the recipe set. The values are not validated."""
        return replace(self, recipe=self.recipe.changed(settings))

    def under(self, name: PolicyName, uncheckpointed: int | None = None) -> RunPlan:
        """The same setup under a checkpointing policy; None leaves the number of ``uncheckpointed`` layers as it is."""
        left_out = {} if uncheckpointed is None else {"train.uncheckpointed_layers": uncheckpointed}
        return self.changed({"train.gradient_checkpointing": name, **left_out})


def memory_of_rows(plan: RunPlan) -> MethodMemory:
    """A method's decisions where it learns from rows of up to ``data.max_seq_len`` tokens, by the cross-entropy of the
    head or, without logits, by a score.
    """
    return MethodMemory(seq_len=plan.recipe.data.max_seq_len, loss_bytes=0 if plan.method.classifier else None)
