"""Measures a model without memory: its sizes, what is trained, and the bytes that its decoder layers hold.

The values are :class:`ftcli.plan.measured.MeasuredModel`. The model is transformers' own with PEFT's adapters on it, as
a run would build it. Its first layers, of each kind one at least, run forward and backward on tensors without memory,
at the true widths, and every storage that lives is counted (:mod:`ftcli.model.measure`).
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ftcli.config.model import LoraConfig
from ftcli.empty_weights import Undrawn
from ftcli.errors import FtcliError, first_line
from ftcli.facts.adapters import AdapterChoice
from ftcli.facts.layers import Linear
from ftcli.model.backbone import backbone_of, base_of, decoder_layers
from ftcli.model.load import config_of
from ftcli.model.lora import apply_lora
from ftcli.model.lora_targets import Targets, chosen, freeze_other_parts, planned_adapters, resolve_targets
from ftcli.model.pretrained import IMPOSSIBLE, hollow, impossible, usable_attention, without_memory
from ftcli.model.quantized import layers_to_quantize
from ftcli.plan.measured import Activations, Growth, LayerKind, MeasuredModel, Question, config_in
from ftcli.plan.precision import DtypePlan
from ftcli.plan.trained import TrainedMatrices, TrainedParameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: No model has a fifth of these, and each is built; a damaged config.json may say billions.
_MOST_LAYERS = 1000
#: transformers' names for the number of layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: Rows of layers with a state are measured in multiples of this, or of the number of tokens that they take together;
#: what longer ones need follows from their growth. transformers' delta rule takes 64.
_TOGETHER = 64
_CHUNKS = ("chunk_size", "mamba_chunk_size", "block_size")
#: The same for layers that take one token after the other, by their parameters' names and dimensions.
_ONE_BY_ONE = 16
_SCANS = (("A_log", 2), ("recurrent_param", 1), ("time_decay", 1))
#: The name of the attention that runs are measured with: SDPA.
_ATTENTION = "ftcli_measured"
Lengths: TypeAlias = tuple[int, int, int]
#: Types of a module's attributes that tell one kind of layer from another.
_TELLING = (bool, int, float, str, type(None))
#: Attributes in which layers of one kind differ.
_INDICES = frozenset({"layer_idx", "layer_id", "layer_index", "block_idx", "training"})


def measured(question: Question) -> MeasuredModel:
    """Measures a model. Its sizes, and the layers at each power of four tokens, are measured once.

    Raises:
        FtcliError: As :func:`ftcli.plan.measured.measured_model`.
    """
    anywhere = replace(question, longest=0, window=None, documents=False, trains=True)
    sizes = _sizes(replace(anywhere, parameter="", adapter=None, compute="", autocast=False))
    longest = question.longest if question.window is not None else _next_power_of_four(question.longest)
    activations, unknown = _activations_or_reason(replace(question, longest=longest, stores=False, classifier=False))
    return replace(sizes, activations=activations, unknown=unknown)


def _next_power_of_four(tokens: int) -> int:
    power = _TOGETHER
    while power < tokens:
        power *= 4
    return power


@lru_cache(maxsize=8)
def _sizes(question: Question) -> MeasuredModel:
    raw = config_in(question)
    _require_bounded(raw)
    config = config_of(raw)
    model = hollow(config)
    if (count := config.get_text_config().num_hidden_layers) < 1:
        raise impossible(ValueError(f"it has {count} layers"))
    lora = None if question.lora is None else LoraConfig.model_validate_json(question.lora)
    packed = _packed(model, wanted=question.stores)
    attention = _attention(question, model)
    layers = list(decoder_layers(model))
    sizes = [_elements(layer) for layer in layers]
    decoder = _elements(*_language(model))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    whole = _elements(model)
    text = config.get_text_config()
    return MeasuredModel(
        hidden_size=int(text.hidden_size),
        vocab_size=int(embedding.weight.shape[0]),
        num_layers=len(layers),
        tied=head is not None and head.weight is embedding.weight,
        parameters=whole,
        other_parameters=whole - decoder,
        outer_elements=decoder - sum(sizes),
        largest_layer=max(sizes),
        largest_tensor=max(p.numel() for p in model.parameters()),
        packed=_shapes(model, packed),
        attention=attention,
        recurrent=_recurrent(model),
        adapters=None if lora is None else planned_adapters(model, lora, packed if question.stores else frozenset()),
        trained=_trained(model, lora, packed if question.stores else frozenset(), classifier=question.classifier),
        activations=None,
    )


def _require_bounded(raw: dict[str, Any]) -> None:
    inside = [raw, *(value for value in raw.values() if isinstance(value, dict))]
    for each in inside:
        count = next((each[name] for name in _LAYERS if isinstance(each.get(name), int)), 0)
        if count > _MOST_LAYERS:
            raise FtcliError.single(
                "FT305",
                f"no model can be built of this config.json: it has {count:,} layers, more than the {_MOST_LAYERS:,} "
                "that are possible",
                help="restore config.json from where the model came",
            )


def _language(model: PreTrainedModel) -> list[nn.Module]:
    head = model.get_output_embeddings()
    return [model.get_decoder(), *([] if head is None else [head])]


def _elements(*modules: nn.Module) -> int:
    """Parameters of modules, each counted once."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def _packed(model: PreTrainedModel, *, wanted: bool) -> frozenset[str]:
    try:
        return layers_to_quantize(model)
    except FtcliError:  # FT336: there is none
        if wanted:
            raise
        return frozenset()


def _attention(question: Question, model: PreTrainedModel) -> str:
    found = usable_attention(question.attention, chosen=question.attention_chosen, model=model)
    if found == "sdpa" and not model._supports_sdpa:
        raise FtcliError.single(
            "FT337",
            f"model.attention: {found}, which transformers does not have for a {type(model).__name__}",
            help="use model.attention: auto, which takes one that it has",
        )
    return found


def _recurrent(model: PreTrainedModel) -> str | None:
    """Layers that carry state from token to token have a convolution over them, which takes no mask of documents."""
    parents = model.get_decoder().modules()
    return next((type(p).__name__ for p in parents if any(isinstance(c, nn.Conv1d) for c in p.children())), None)


def _shapes(model: PreTrainedModel, names: Collection[str]) -> tuple[tuple[Linear, int], ...]:
    shapes = Counter(tuple(model.get_submodule(name).weight.shape) for name in names)
    return tuple((Linear("packed", inner, outer), count) for (outer, inner), count in shapes.items())


def _trained(
    model: PreTrainedModel, lora: LoraConfig | None, packed: Collection[str], *, classifier: bool
) -> TrainedParameters:
    hidden = model.get_input_embeddings().weight.shape[1]
    score = [TrainedMatrices(1, hidden, 1, "vector")] if classifier else []
    if lora is None:
        return _trained_whole(model, score)
    planned = planned_adapters(model, lora, packed)
    targets = chosen(resolve_targets(model, lora.target_modules, packed, experts=lora.experts), lora)
    found = Counter(_adapter_matrices(model, lora, targets))
    matrices = [TrainedMatrices(rows, columns, count) for (rows, columns), count in found.items()]
    listed = sum(m.elements * m.count for m in matrices)
    total = listed if planned.parameters is None else planned.parameters
    beside = total - listed  # DoRA's lengths, and what is trained whole
    whole = [TrainedMatrices(1, beside, 1, "vector")] if beside else []
    return TrainedParameters(total + len(score) * hidden, (*matrices, *whole, *score))


def _adapter_matrices(model: PreTrainedModel, lora: LoraConfig, targets: Targets) -> Iterator[tuple[int, int]]:
    rank = AdapterChoice(lora).rank
    for name in targets.modules:
        outer, inner = model.get_submodule(name).weight.shape
        yield rank(name), inner
        yield outer, rank(name)
    for name in targets.parameters:
        shape = model.get_parameter(name).shape
        together = rank(name.removesuffix(".weight")) * (shape[0] if len(shape) == 3 else 1)
        yield together, shape[-1]
        yield shape[-2], together


def _trained_whole(model: PreTrainedModel, score: Sequence[TrainedMatrices]) -> TrainedParameters:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    ends = {id(embedding): "embedding"}
    if head is not None and head.weight is not embedding:
        ends[id(head.weight)] = "head"
    matrices: list[TrainedMatrices] = list(score)
    total = sum(m.elements for m in score)
    for parameter in {id(p): p for part in _language(model) for p in part.parameters()}.values():
        part: Any = ends.get(id(parameter), "hidden")
        if score and part == "head":
            continue
        total += parameter.numel()
        if parameter.dim() > 1:
            rows = parameter.shape[0]
            matrices.append(TrainedMatrices(rows, parameter.numel() // rows, 1, part))
    return TrainedParameters(total, tuple(matrices))


@lru_cache(maxsize=32)
def _activations_or_reason(question: Question) -> tuple[Activations | None, str]:
    config = config_of(config_in(question))
    lora = None if question.lora is None else LoraConfig.model_validate_json(question.lora)
    try:
        return _activations(question, config, lora), ""
    except FtcliError:
        raise
    except IMPOSSIBLE as error:  # transformers' code asks for a number that only a real tensor has
        return None, f"its layers do not run without memory: {type(error).__name__}: {first_line(error)}"


@dataclass(slots=True)
class _Passes:
    """Bytes of one forward and backward pass, by kind of layer: ``stream`` is what it hands on, ``left`` all that
    stands behind it where nothing is kept.
    """

    entry: int
    last: int
    kept: list[int]
    stream: list[int]
    left: list[int]
    forward: list[int]
    backward: list[int]


def _lengths(question: Question, model: PreTrainedModel) -> Lengths:
    """Three lengths of rows, the shortest first, between which bytes grow as a polynomial of degree two.

    Beyond a sliding window attention has a mask, so all of them are longer than that, or none.
    """
    longest, window = question.longest, question.window
    shortest = 0 if window is None or window >= longest else window
    if (unit := _unit(model)) is not None:
        longest = min(longest, 4 * max(unit, shortest))
    first = max(longest // 4, shortest, 2)
    second = 2 * first if 2 * first < longest else (first + longest) // 2
    return first, max(second, first + 1), max(longest, first + 2)


def _unit(model: PreTrainedModel) -> int | None:
    """Tokens that layers with a state take together, in Python's time; None where attention takes all at once."""
    decoder: Any = model.get_decoder()
    scans = [(name.rpartition(".")[2], p.dim()) for name, p in decoder.named_parameters()]
    if any(each in _SCANS for each in scans):
        return _ONE_BY_ONE
    if _recurrent(model) is None:
        return None
    text = model.config.get_text_config()
    return max([_TOGETHER, *(size for name in _CHUNKS if isinstance(size := getattr(text, name, None), int))])


def _activations(question: Question, config: PretrainedConfig, lora: LoraConfig | None) -> Activations:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT and transformers, which a run says again
        model = _adapted(question, config, lora)
        base = base_of(model)
        layers = decoder_layers(base)
        kinds = _kinds(list(layers))
        examples = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        elements = [sum(p.numel() for n, p in layers[i].named_parameters() if "lora_" not in n) for i in examples]
        counts = Counter(kinds)
        del layers[max(examples) + 1 :]
        lengths = first, second, third = _lengths(question, base)
        with FakeTensorMode() as fake:
            without_memory(model)
            once = partial(_pass, model, list(layers), examples, question)
            found = [once(1, first), once(1, second), once(1, third), once(2, first)]
            del fake
    grown = partial(_growth, lengths)
    return Activations(
        kinds=tuple(
            LayerKind(
                count=counts[kind],
                elements=elements[index],
                kept=grown([each.kept[index] for each in found]),
                # Only what autocast makes of weights depends on no row.
                handed=replace(
                    grown([each.stream[index] for each in found]),
                    fixed=max(0.0, grown([each.left[index] for each in found]).fixed),
                ),
                forward=grown([each.forward[index] for each in found]),
                backward=grown([each.backward[index] for each in found]),
            )
            for index, kind in enumerate(dict.fromkeys(kinds))
        ),
        entry=grown([each.entry for each in found]),
        last=grown([each.last for each in found]),
    )


def _growth(lengths: Lengths, found: Sequence[int]) -> Growth:
    """The polynomial through one row of each length, and two of the shortest."""
    x0, x1, x2 = lengths
    fixed = float(2 * found[0] - found[3])
    y0, y1, y2 = (value - fixed for value in found[:3])
    first, second = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    c = (second - first) / (x2 - x0)
    b = first - c * (x0 + x1)
    return Growth(fixed, y0 - b * x0 - c * x0**2, b, c)


def _adapted(question: Question, config: PretrainedConfig, lora: LoraConfig | None) -> Any:
    """The model on ``meta`` as it is trained, quantized nowhere: layers keep the same then."""
    config = copy.deepcopy(config)
    outline = hollow(config)
    attention = usable_attention(question.attention, chosen=question.attention_chosen, model=outline)
    plain = attention == "sdpa" and not question.documents and outline._can_set_attn_implementation()
    dtype = getattr(torch, question.parameter)
    model = hollow(config, dtype=dtype, attn_implementation=attention)
    if plain:
        _register()
        text = model.config.get_text_config()
        model.set_attn_implementation(_ATTENTION if text is model.config else {"text_config": _ATTENTION})
    if lora is None:
        freeze_other_parts(model)
        return model.train()
    dtypes = DtypePlan(question.parameter, question.adapter, question.compute, question.autocast, "")
    with torch.device("meta"), Undrawn():
        adapted, _ = apply_lora(model, lora.model_copy(update={"init_lora_weights": True}), dtypes, seed=0)
    return adapted.train()


def _register() -> None:
    """Adds SDPA under a name whose mask is left out where there is no padding.

    Under ``sdpa`` transformers makes one whenever tensors have no memory: it cannot see that a row is one document.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, _mask)


def _mask(*args: Any, **settings: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    others = bool(settings.get("use_vmap"))  # what a query sees is not what comes before it alone
    found: Tensor | None = sdpa_mask(*args, **{**settings, "allow_is_causal_skip": not others})
    return found


def _kinds(layers: Sequence[nn.Module]) -> list[int]:
    """A number for each layer, the same for those that are built alike."""
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(_telling(layer), len(numbers)) for layer in layers]


def _telling(layer: nn.Module) -> tuple[object, ...]:
    parts: list[object] = [(name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters()]
    for name, module in layer.named_modules():
        plain = {k: _kind(v) for k, v in vars(module).items() if isinstance(v, _TELLING) and k not in _INDICES}
        parts.append((name, type(module).__name__, tuple(sorted(plain.items(), key=lambda item: item[0]))))
    return tuple(parts)


def _kind(value: object) -> object:
    """The part of a value that bytes may depend on: of a factor, which may be another one in each layer (DiffLlama),
    whether it is 0.
    """
    return (float, value != 0) if isinstance(value, float) else value


def _pass(
    model: Any, layers: Sequence[nn.Module], examples: Sequence[int], question: Question, rows: int, length: int
) -> _Passes:
    alone = _forward(model, layers, question, rows, length, gradients=False)
    left = [alone.ends[i] - alone.begins[i] for i in examples]
    stream = [alone.streams[i] for i in examples]
    forward = [alone.live.most(alone.begun[i], alone.ended[i]) - alone.begins[i] for i in examples]
    if not question.trains:
        nothing = [0] * len(examples)
        return _Passes(alone.begins[0], alone.total - alone.ends[-1], left, stream, left, forward, nothing)
    del alone.states
    run = _forward(model, layers, question, rows, length, gradients=True)
    kept = [run.ends[i] - run.begins[i] for i in examples]
    entry, last = run.begins[0], run.total - run.ends[-1]
    backward = _backward(model, run)
    return _Passes(entry, last, kept, stream, left, forward, [backward[i] for i in examples])


@dataclass(slots=True)
class _Run:
    """A forward pass: bytes alive before and behind each layer, and the marks of these moments."""

    live: LiveBytes
    begins: list[int]
    ends: list[int]
    begun: list[int]
    ended: list[int]
    outputs: list[Any]
    streams: list[int]
    total: int = 0
    states: Any = None


def _forward(
    model: Any, layers: Sequence[nn.Module], question: Question, rows: int, length: int, *, gradients: bool
) -> _Run:
    base = base_of(model)
    run = _Run(LiveBytes([*model.parameters(), *model.buffers()]), [], [], [], [], [], [])

    def before(_module: nn.Module, _args: object, _given: object) -> None:
        run.begins.append(run.live.now)
        run.begun.append(run.live.mark())

    def behind(_module: nn.Module, _args: object, output: Any) -> None:
        run.ends.append(run.live.now)
        run.ended.append(run.live.mark())
        stream = output if isinstance(output, Tensor) else output[0]
        run.streams.append(stream.untyped_storage().nbytes())
        run.outputs.append(stream)

    def wanted(_module: nn.Module, _args: object, output: Tensor) -> None:
        if gradients:
            output.requires_grad_(True)  # as of every layer but the first

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(behind) for layer in layers]
    handles.append(base.get_input_embeddings().register_forward_hook(wanted))
    autocast: Any = nullcontext()
    if question.autocast:
        autocast = torch.autocast("cpu", dtype=getattr(torch, question.compute))
    try:
        with torch.set_grad_enabled(gradients), run.live, autocast:
            ids = torch.zeros((rows, length), dtype=torch.long)
            run.states = backbone_of(base)(input_ids=ids, use_cache=False).last_hidden_state
            run.total = run.live.now
    finally:
        for handle in handles:
            handle.remove()
    if not gradients:
        run.outputs.clear()
    return run


def _backward(model: Any, run: _Run) -> list[int]:
    """The most that each layer's backward pass allocates."""
    marks = [0] * (len(run.outputs) + 1)

    def mark(index: int) -> Callable[[Tensor], None]:
        def reached(_gradient: Tensor) -> None:
            marks[index] = run.live.mark()

        return reached

    for index, output in enumerate(run.outputs):
        output.register_hook(mark(index))
    states, run.states = run.states, None
    assert states is not None
    run.outputs.clear()
    with run.live:
        gradient = torch.empty_like(states)
        states.backward(gradient)
        del states, gradient
    end = run.live.mark()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found = []
    for index in range(len(marks) - 1):
        until = marks[index - 1] if index else end
        begin = run.live.at(marks[index], without=grads)
        found.append(run.live.most(marks[index], until, without=grads) - begin)
    for parameter in model.parameters():
        parameter.grad = None
    return found


class LiveBytes(TorchDispatchMode):
    """A block in which the storages that are made are counted, each once and as long as it lives.

    Args:
        before: Tensors that were there before, such as weights: they are not counted.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self._numbers: dict[int, int] = {}
        self._before = [tensor.untyped_storage() for tensor in before]
        for storage in self._before:
            self._numbers[storage._cdata] = -1
        #: The number of a storage and the bytes that came or went with it.
        self._events: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        grouped = func is torch.ops.aten._grouped_mm.default
        out = _grouped(*args, **(kwargs or {})) if grouped else func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._numbers or not size:
            return
        number = self._numbers[address] = len(self._events)
        self.now += size
        self._events.append((number, size))
        weakref.finalize(storage, self._gone, address, number, size)

    def _gone(self, address: int, number: int, size: int) -> None:
        self._numbers.pop(address, None)
        self.now -= size
        self._events.append((number, -size))

    def mark(self) -> int:
        """The present, for :meth:`at` and :meth:`most`."""
        return len(self._events)

    def at(self, mark: int, *, without: Iterable[Tensor] = ()) -> int:
        """Bytes that were alive at a mark, ``without`` what holds these tensors now."""
        return self._series(0, mark, self._held(without))[-1]

    def most(self, begin: int, end: int, *, without: Iterable[Tensor] = ()) -> int:
        """The most bytes that were alive between two marks."""
        return max(self._series(begin, end, self._held(without)))

    def _held(self, tensors: Iterable[Tensor]) -> set[int]:
        return {self._numbers.get(tensor.untyped_storage()._cdata, -1) for tensor in tensors}

    def _series(self, begin: int, end: int, excluded: set[int]) -> list[int]:
        total, found = 0, []
        for index, (number, size) in enumerate(self._events[:end]):
            if index == begin:
                found.append(total)
            total += 0 if number in excluded else size
            if index >= begin:
                found.append(total)
        return [*found, total]


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """A tensor like the result of ``_grouped_mm``, whose rule for tensors without memory knows bfloat16 alone."""
    if a.dim() == 2 and b.dim() == 2:  # summed over the rows of each group
        assert offs is not None
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]))
    if a.dim() == 3 and b.dim() == 2:
        return a.new_empty((a.shape[1], b.shape[1]))
    return a.new_empty((*a.shape[:-1], b.shape[-1]))
