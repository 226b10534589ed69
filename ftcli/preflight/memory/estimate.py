"""How many bytes a run needs, in parts, before anything is loaded. Pure arithmetic on a recipe and a model's shape.

The run passes through phases, and each phase holds some of the parts at once; the largest phase is the estimate.

==============  ======================================================================================================
forward         everything persistent, all kept activations, the last hidden states, and a chunk of the loss' logits
backward        everything persistent, all kept activations, and what one layer's backward allocates (with
                gradient_checkpointing: what of one layer's activations is computed again). The kernels' layers begin
                when the hidden states are gone
end of backward everything persistent and what the first layer's backward allocates, or that of the embeddings
optimizer step  everything persistent and the optimizer's temporaries; activations are gone
evaluation      weights, adapters and optimizer state; one layer at a time, no gradients; the key-value cache where
                answers are generated
generation      GRPO: the same with the cache of a whole generation batch
export          weights and adapters
==============  ======================================================================================================

Gradients are there from the end of a backward pass to the optimizer's step: in the phases before only where
micro-batches are accumulated. Under autocast each trained matrix is cast once in a forward pass, and the copies live
until its context ends; what backward needs of them it keeps, or, where layers run again, makes anew for one layer.

Activations come from :mod:`ftcli.preflight.memory.activations`; what ``gradient_checkpointing: offload`` puts into
pinned host memory is counted beside them: what the halves of the layers are run again from, or, where that is more than
the host has room for, the layers' inputs. The loss works on chunks of rows whose logits stay under 512 MiB, all in one
buffer (``ftkernels.linear_cross_entropy``): in place by its kernel on a GPU, with a few float32 copies on a CPU.

``kernels/bench/memory.py`` holds it against a GPU, whole models and every shipped recipe: docs/performance.md has what
came of it. tests/gpu/test_memory_estimate.py does the same phase by phase with fewer layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from ftkernels.limits import LOSS_VOCABULARY_SLAB, loss_bytes, packed_rank

from ftcli.config import Recipe
from ftcli.config.training import Checkpointing
from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import ModelFacts
from ftcli.facts.precision import DtypePlan
from ftcli.facts.quantization import dequantized_bytes, layers_with_room, weight_bytes
from ftcli.facts.shape import ModelShape
from ftcli.facts.trained import Trained, optimizer_state_bytes, trained_parameters
from ftcli.preflight.execution import Execution, Work, execution_of
from ftcli.preflight.memory.activations import (
    ActivationPolicy,
    Offloaded,
    Setting,
    host_bytes,
    norm_bytes,
    pinnable_bytes,
    plain_policy,
)
from ftcli.preflight.memory.result import MemoryEstimate
from ftcli.preflight.memory.workspaces import cublas_bytes, grpo_loss_bytes, mask_bytes
from ftcli.tables import optimizers, quantizations

#: CUDA context and loaded kernels; on a CPU the interpreter with torch and transformers.
_RUNTIME_BYTES = {"cuda": 600 * 2**20, "cpu": 850 * 2**20}
#: Share of the short-lived memory that torch's allocator holds beyond what is asked of it.
_FRAGMENTATION = 0.05
#: Parts that are there in some phases only, though they outlive what allocates them.
_PASSING = ("gradients", "autocast copies")


def estimate_memory(
    recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, *, work: Work
) -> MemoryEstimate | None:
    """The estimate for one kind of work; None for a model family that ftcli has no arithmetic for.

    ``work`` is ``train`` (and bench), ``grpo``, ``eval`` or ``export`` (which holds weights and adapters only). Raises
    ValueError for training under ``gradient_checkpointing: auto``: see :mod:`ftcli.preflight.memory.policy`.
    """
    shape = facts.shape
    if shape is None:
        return None
    execution = execution_of(recipe, facts, plan, device, work=work)
    kept = _kept_layers(recipe, facts, plan, device, work)
    arithmetic = _within_host(_Arithmetic(recipe, facts, shape, plan, device, execution, kept), work)
    parts = {"weights": arithmetic.weights(work), **arithmetic.persistent(work)}
    held = tuple(parts)
    at_rest = tuple(name for name in held if name not in _PASSING)
    phases: dict[str, tuple[str, ...]] = {}
    if work in ("train", "grpo"):
        parts |= arithmetic.training(work, recipe.train.per_device_train_batch_size)
        dense = arithmetic.dequantized()
        parts |= dense
        earlier = ("gradients",) if recipe.train.gradient_accumulation_steps > 1 else ()
        copies = ("autocast copies",) if "autocast copies" in parts else ()
        cast = ("copies run again",) if "copies run again" in parts else copies
        phases["forward"] = (*at_rest, *earlier, *copies, "activations", "hidden states", "loss workspace")
        head = ("head gradient",) if "head gradient" in parts else ()
        last = ("hidden states",) if execution.kernels == "transformers" else ()
        phases["backward"] = (*at_rest, *earlier, *cast, *head, *last, "activations", "backward workspace", *dense)
        phases["end of backward"] = (*at_rest, "gradients", "last workspace", *dense)
        phases["optimizer step"] = (*at_rest, "gradients", "optimizer workspace")
    if work == "grpo":
        parts["generation"] = arithmetic.generation_batch()
        phases["generation"] = (*at_rest, *copies, "generation")
    if work == "export":
        phases["export"] = at_rest
    elif work == "eval" or recipe.data.eval or recipe.eval.tasks:
        parts["evaluation"] = arithmetic.evaluation()
        # Layers as transformers wrote them are cast in evaluation as well, where their weights may be trained.
        cast = ("autocast copies",) if "autocast copies" in parts and execution.kernels == "transformers" else ()
        phases["evaluation"] = (*at_rest, *cast, "evaluation")
    shortlived = max(sum(parts[n] for n in names if n not in held) for names in phases.values())
    parts["runtime"] = _RUNTIME_BYTES[device.kind] + int(_FRAGMENTATION * shortlived)
    phases = {phase: (*names, "runtime") for phase, names in phases.items()}
    whole = execution.policy.formed_again is None  # layers that know no halves send their input
    sent: Offloaded = "layers" if whole else arithmetic.offloaded
    offloaded = sent if (pinned := arithmetic.pinned_host_bytes(work)) else None
    return MemoryEstimate(MappingProxyType(parts), MappingProxyType(phases), pinned, offloaded, kept)


def _within_host(arithmetic: _Arithmetic, work: Work) -> _Arithmetic:
    """With the layers' inputs alone on the host where what the halves need is more than it has room for."""
    free = arithmetic.device.host_free_bytes
    if free is None or arithmetic.pinned_host_bytes(work) <= pinnable_bytes(free):
        return arithmetic
    return replace(arithmetic, offloaded="layers")


def _kept_layers(recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, work: Work) -> int:
    """How many layers ``quantization.keep_dequantized`` comes to."""
    quantization, shape = recipe.quantization, facts.shape
    possible = quantizations.row(quantization.method).holds_dequantized
    if not possible or not quantization.keep_dequantized or shape is None or work == "export":
        return 0
    if quantization.keep_dequantized is True:
        return shape.num_layers
    packed = quantization.model_copy(update={"keep_dequantized": False})
    lean = estimate_memory(recipe.model_copy(update={"quantization": packed}), facts, plan, device, work=work)
    assert lean is not None
    needed, available = lean.total_bytes, device.available_bytes
    return layers_with_room(quantization, shape, plan.parameter_bytes, needed, available)


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """The terms of one estimate; every method answers bytes."""

    recipe: Recipe
    facts: ModelFacts
    shape: ModelShape
    plan: DtypePlan
    device: DeviceFacts
    execution: Execution
    kept_layers: int
    offloaded: Offloaded = "halves"

    @property
    def policy(self) -> ActivationPolicy:
        return self.execution.policy

    @property
    def checkpointing(self) -> Checkpointing:
        return self.recipe.train.checkpointing

    @property
    def uncheckpointed(self) -> int:
        """Layers that keep everything whatever the others do."""
        if self.checkpointing not in ("selective", "offload"):
            return 0
        return min(self.recipe.train.uncheckpointed_layers, self.shape.num_layers)

    @property
    def runs_again_on_kernels(self) -> bool:
        """Whole layers, or both halves, are run again, and what the kernels pack is not kept."""
        return self.execution.kernels != "transformers" and self.checkpointing in (True, "offload")

    def pinned_host_bytes(self, work: Work) -> int:
        """Activations that training sends to the host; a CPU's memory is the host's, and nothing is sent."""
        if work not in ("train", "grpo") or self.device.kind == "cpu":
            return 0
        setting, rows = self.setting(self.seq_len(work), padded=False), self.recipe.train.per_device_train_batch_size
        return host_bytes(
            self.shape,
            setting,
            self.policy,
            rows,
            checkpointing=self.checkpointing,
            offloaded=self.offloaded,
            uncheckpointed=self.uncheckpointed,
        )

    def seq_len(self, work: Work) -> int:
        """Longest row in tokens."""
        if work == "grpo" and self.recipe.grpo is not None:
            return self.recipe.grpo.max_prompt_length + self.recipe.grpo.max_completion_length
        return self.recipe.data.max_seq_len

    def setting(self, seq_len: int, *, padded: bool) -> Setting:
        """What the activation terms depend on. ``padded``: rows of a batch may differ in length."""
        lora = self.recipe.lora
        return Setting(
            seq_len=seq_len,
            bytes_residual=self.plan.parameter_bytes,
            bytes_compute=self.plan.compute_bytes,
            autocast=self.plan.autocast,
            adapted=self.shape.adapted(lora.target_modules) if lora is not None else (),
            rank=lora.r if lora is not None else 0,
            dropout=lora is not None and lora.dropout > 0,
            full=lora is None,
            softcap=bool(self.facts.attn_logit_softcapping),
            padded=padded,
        )

    def weights(self, work: Work) -> int:
        """The base model; export merges into it in full precision."""
        if work == "export":
            return self.shape.parameters * self.plan.parameter_bytes
        quantization, element = self.recipe.quantization, self.plan.parameter_bytes
        return weight_bytes(quantization, self.shape, element, kept_layers=self.kept_layers)

    def dequantized(self) -> dict[str, int]:
        """The one matrix that a product of quantised weights needs in the compute dtype; no part without such."""
        if self.kept_layers == self.shape.num_layers:
            return {}
        fused = self.execution.kernels != "transformers"
        dense = dequantized_bytes(self.recipe.quantization, self.shape, self.plan, self.device, on_kernels=fused)
        return {"dequantized weights": dense} if dense else {}

    def persistent(self, work: Work) -> dict[str, int]:
        """What outlives a pass over one micro-batch, beside the base weights."""
        lora = self.recipe.lora
        trained = trained_parameters(self.recipe, self.shape)
        parts: dict[str, int] = {}
        if lora is not None:
            parts["adapters"] = 4 * trained.elements
        workspaces = cublas_bytes(self.device, self.execution, backward=work in ("train", "grpo"))
        if workspaces and work != "export":
            parts["cuBLAS workspaces"] = workspaces
        if work in ("eval", "export"):
            return parts
        if self.plan.autocast:
            # Each trained matrix is kept once more, cast (autocast) or packed (kernels), until the pass ends.
            cast = self.packed_adapters(trained) if lora is not None else self.shape.linear_parameters
            if self.runs_again_on_kernels:  # one layer's at a time, beside those of layers that do not run again
                cast = cast * min(1 + self.uncheckpointed, self.shape.num_layers) // self.shape.num_layers
            parts["autocast copies"] = self.plan.compute_bytes * cast
        parts["gradients"] = 4 * trained.elements
        parts["optimizer"] = optimizer_state_bytes(self.recipe.train.optim, trained)
        if work == "grpo" and lora is None and self.recipe.grpo is not None and self.recipe.grpo.beta > 0:
            parts["reference model"] = self.shape.parameters * self.plan.parameter_bytes
        return parts

    def packed_adapters(self, trained: Trained) -> int:
        """Elements of the adapters' copies: the kernels pad the rank."""
        lora = self.recipe.lora
        if lora is None or self.execution.kernels == "transformers":
            return trained.elements
        return trained.elements * packed_rank(lora.r) // lora.r

    def training(self, work: Work, rows: int) -> dict[str, int]:
        """Short-lived parts of one micro-batch of ``rows`` rows."""
        seq_len = self.seq_len(work)
        tokens = rows * seq_len
        # Supervised training pads on the right under causal attention and needs no mask; TRL's GRPO hands one over.
        masked = work == "grpo" and rows > 1
        # transformers' layers keep documents apart by a mask as well.
        documents = self.recipe.data.packing and self.execution.kernels == "transformers"
        setting = self.setting(seq_len, padded=masked)
        layer = self.policy.held(self.shape, setting, self.checkpointing, self.offloaded)
        states = self.hidden_states(tokens, setting)
        # What backward begins with is there before any of the kernels' layers.
        whole = self.policy.held(self.shape, setting, False, self.offloaded) if self.uncheckpointed else layer
        workspace = int(tokens * max(layer.workspace, whole.workspace))
        backward = max(workspace, states if self.execution.kernels != "transformers" else 0)
        run_again = self.shape.num_layers - self.uncheckpointed
        kept = tokens * (run_again * layer.kept + self.uncheckpointed * whole.kept)
        if self.device.kind == "cpu":  # what goes to the host elsewhere stays where it is
            kept += tokens * run_again * layer.host
        trained = trained_parameters(self.recipe, self.shape)
        foreach = optimizers.row(self.recipe.train.optim).foreach and self.device.kind == "cuda"
        element = self.plan.compute_bytes
        parts = {
            "activations": int(kept) + self.shared(rows, seq_len, padded=masked or documents),
            "hidden states": states,
            "loss workspace": grpo_loss_bytes(tokens, self.shape.hidden_size, element)
            if work == "grpo"
            else self.loss(tokens, training=True),
            "backward workspace": backward,
            "last workspace": max(backward + int(tokens * layer.kept), self.embedding_gradient()),
            "optimizer workspace": 4 * trained.elements if foreach else 0,
        }
        if self._head_is_trained() and work == "train":
            parts["head gradient"] = 4 * self.shape.hidden_size * self.shape.vocab_size
        runs_again = self.checkpointing is not False and self.execution.kernels == "transformers"
        if self.plan.autocast and runs_again:
            cast = trained.elements if self.recipe.lora is not None else self.shape.linear_parameters
            at_once = min(1 + self.uncheckpointed, self.shape.num_layers)
            parts["copies run again"] = element * cast * at_once // self.shape.num_layers
        return parts

    def embedding_gradient(self) -> int:
        """The last gradient of a backward pass, dense, beside those that are finished; a tied head's waits for it."""
        lora = self.recipe.lora
        if lora is not None and "embed_tokens" not in lora.modules_to_save:
            return 0
        waiting = self.shape.tied and self.recipe.train.gradient_accumulation_steps > 1
        return 4 * self.shape.hidden_size * self.shape.vocab_size * (2 if waiting else 1)

    def hidden_states(self, tokens: int, setting: Setting) -> int:
        """The backbone's output, its gradient that the loss computes in forward, and what the last norm keeps."""
        norm = norm_bytes(self.shape.hidden_size, self.shape, setting, setting.bytes_residual)
        return int(tokens * (2 * self.shape.hidden_size * self.plan.parameter_bytes + norm))

    def shared(self, rows: int, seq_len: int, *, padded: bool) -> int:
        """What is made once for all layers: masks, and the cosines and sines of the positions."""
        tables = 2 * seq_len * self.shape.head_dim * self.plan.parameter_bytes
        return tables + self.masks(rows, seq_len, seq_len, padded=padded)

    def masks(self, rows: int, queries: int, keys: int, *, padded: bool) -> int:
        element = self.plan.parameter_bytes
        return mask_bytes(self.execution, rows, queries, keys, self.facts.sliding_window, element, padded=padded)

    def loss(self, tokens: int, *, training: bool) -> int:
        vocabulary, element = self.shape.vocab_size, self.plan.compute_bytes
        needed = loss_bytes(tokens, vocabulary, element, on_gpu=self.device.kind == "cuda")
        if self.plan.parameter_bytes != element:
            needed += vocabulary * self.shape.hidden_size * element  # the head, cast
        if training and self._head_is_trained():
            needed += 4 * self.shape.hidden_size * (vocabulary + min(vocabulary, LOSS_VOCABULARY_SLAB))
        return needed

    def _head_is_trained(self) -> bool:
        lora = self.recipe.lora
        return lora is None or "lm_head" in lora.modules_to_save

    def evaluation(self) -> int:
        """The larger of a forward pass with loss and of generating, for one evaluation batch."""
        recipe = self.recipe
        rows, seq_len = recipe.eval.per_device_eval_batch_size, recipe.data.max_seq_len
        tokens = rows * seq_len
        setting = self.setting(seq_len, padded=False)
        hidden = 3 * tokens * self.shape.hidden_size * self.plan.parameter_bytes
        hidden += self.shared(rows, seq_len, padded=False)
        layer = int(tokens * self.policy.forward_peak(self.shape, setting)) + sum(self.dequantized().values())
        scoring = hidden + max(layer, self.loss(tokens, training=False))
        return max(scoring, self.generation(rows, seq_len, seq_len)) if recipe.eval.tasks else scoring

    def generation_batch(self) -> int:
        """GRPO's: completions of an optimizer step's prompts, all at once."""
        train, grpo = self.recipe.train, self.recipe.grpo
        assert grpo is not None
        rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
        return self.generation(rows, grpo.max_prompt_length, grpo.max_prompt_length + grpo.max_completion_length)

    def generation(self, rows: int, prompt: int, seq_len: int) -> int:
        """Key-value cache of ``rows`` sequences, and a forward pass: over the prompts, or over one token of each when
        the cache has grown to ``seq_len``. Where rows are padded each layer repeats keys and values for all heads.
        """
        shape, element = self.shape, self.plan.parameter_bytes
        token = 2 * rows * shape.kv_width * element  # of one layer's cache
        # Through transformers' own layers, for the cache, with the attention of the others.
        policy = plain_policy("eager" if self.execution.attention == "eager" else "sdpa")
        prefill = rows * prompt * policy.forward_peak(shape, self.setting(prompt, padded=rows > 1))
        prefill += shape.num_layers * token * prompt + self.masks(rows, prompt, prompt, padded=rows > 1)
        repeated = token * seq_len * shape.num_heads // shape.num_kv_heads
        decoding = shape.num_layers * token * seq_len + max(repeated, token * seq_len // 2)
        logits = rows * shape.vocab_size * (4 + self.plan.compute_bytes)
        return max(int(prefill), decoding) + logits + sum(self.dequantized().values())
