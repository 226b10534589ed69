"""Calibration: the run's own training rows through the merged model, a decoder layer at a time.

All rows go through a layer before the next one is read. In a layer they go twice: as it is, to see what each linear
layer is given, and with its weights rounded, to have what the next layer will be given. Only that layer's weights are
in memory, in float32, on the GPU where there is one.

Smoothing (AWQ, SmoothQuant): for linear layers with one input x, factors s of ``|x|ʳ / |w|¹⁻ʳ`` over several r are
tried on a sample of x, and the s with the least error of the rounded layers' outputs is taken, if it is less than
without. x comes divided by s: the norm in front has its weight divided, or the layer in front its rows. Which norm that
is, is seen in the tensors that it hands on; and what the decoder layer answers must stay what it was, else the factors
are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ftcli.config.load import load_recipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.export.lazy import computing_from
from ftcli.export.safetensors import ModelPlan
from ftcli.export.scheme import Calibration, Given, Scheme, Smoothing
from ftcli.export.source import ExportSource, source_stops, source_tokenizer, unwritten
from ftcli.export.tensorfile import TensorFile
from ftcli.facts.device import probe_device
from ftcli.model.backbone import decoder_layers
from ftcli.tables.methods import method_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe

#: Of each source, so many times the rows that are asked for are read, and the rows drawn from these.
_READ = 8
#: Tokens that go through a layer at once; tokens that factors are tried on, and rows of weights.
_TOKENS, _SAMPLE, _TRIED_ROWS = 4096, 512, 512
#: Exponents that are tried.
_EXPONENTS = tuple(step / 10 for step in range(11))
#: How far a decoder layer's answers may move by factors that take each other back, in float32.
_SAME = 1e-3
#: Layers in a row with one function of numbers between them, whose rows can be divided by what the next ones' columns
#: are multiplied by.
_IN_A_ROW = (("up_proj", "down_proj"),)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The result of a calibration.

    Attributes:
        files: Tensors that are written in place of the merged ones, or of their parts, by their keys.
        given: Of each rounded weight, by its name.
        rows, columns: Factors (O,) and (I,) of weights by their names, before rounding.
        norms: Weights of norms that were divided by factors, as they are stored.
    """

    files: Mapping[str, TensorFile] = field(default_factory=dict)
    given: Mapping[str, Given] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, int | float] = field(default_factory=dict)
    warnings: tuple[Finding, ...] = ()

    def smoothed(self, name: str, weight: Tensor) -> Tensor:
        """A merged weight with its factors."""
        if name in self.norms:
            return self.norms[name]
        weight = weight * self.columns[name] if name in self.columns else weight
        return weight * self.rows[name][:, None] if name in self.rows else weight


def calibration_rows(source: ExportSource) -> list[list[int]]:
    """Token ids of rows that the run was trained on, under its own template, drawn by the run's seed; none is held out.

    Of a method whose rows are prompts they are these prompts.

    Raises FtcliError FT778 (exit 2) where no run is known; whatever reading the rows raises (exit 4).
    """
    if source.run is None:
        raise _no_rows(f"{source.folder} is in no run directory")
    recipe, settings = load_recipe(source.run[0] / "recipe.yaml").recipe, source.settings.calibration
    if not recipe.data.train:
        raise _no_rows(f"{source.run[0]} names no data.train")
    most = settings.rows * _READ
    data = recipe.data.with_held_out()
    sources = [one.model_copy(update={"max_rows": min(one.max_rows or most, most)}) for one in data.train]
    recipe = recipe.model_copy(update={"data": data.model_copy(update={"train": tuple(sources)})})
    found = _prompts(source, recipe) if method_of(recipe, "check").from_prompts else _answered(source, recipe)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(source.run[1])).tolist()
    return [list(found[at])[: settings.row_tokens] for at in order[: settings.rows]]


def _no_rows(reason: str) -> FtcliError:
    help = "export a run that names its rows, or export.formats: [w4a16], [mxfp4] or [fp8], which need none"
    message = f"{reason}: there are no rows to calibrate with"
    return FtcliError.single("FT778", message, exit_code=ExitCode.RECIPE, help=help)


def _answered(source: ExportSource, recipe: Recipe) -> list[Sequence[int]]:
    from ftcli.data.prepare import prepare

    tokenizer, data = source_tokenizer(source), recipe.data
    prepared = prepare(data.train, data, tokenizer, source_stops(source, tokenizer), offline=source.offline)
    return [row.input_ids for row in prepared.sequences]


def _prompts(source: ExportSource, recipe: Recipe) -> list[Sequence[int]]:
    from ftcli.data.asked import asked_rows, room_of_task

    tokenizer, data = source_tokenizer(source), recipe.data
    room = room_of_task(data, recipe.eval.generate)
    asked, _ = asked_rows(data.train, data, tokenizer, room, offline=source.offline)
    return list(tokenizer([one.text for one in asked], add_special_tokens=False)["input_ids"])


def calibrate(
    source: ExportSource,
    plan: ModelPlan,
    rounded: Mapping[str, str],
    scheme: Scheme,
    folder: Path,
    say: Callable[[str], None],
) -> Calibrated:
    """Runs the rows through the model, and writes the rounded weights into files in ``folder``, one for each layer.

    Args:
        rounded: The names in the model of the weights to round, by their keys.

    Raises FtcliError FT740 for linear layers that the rows do not reach, and as :func:`calibration_rows`; OSError where
    they cannot be written.
    """
    rows = calibration_rows(source)
    tokens = sum(len(row) for row in rows)
    say(f"calibrating with {len(rows)} rows of {tokens:,} tokens")
    walk = _Walk(plan, {name: key for key, name in rounded.items()}, scheme, folder, rows, say)
    walk.run()
    unseen = next((name for name in rounded.values() if name not in walk.given), None)
    if unseen is not None:
        message = f"the calibration rows do not reach {unseen}, so nothing is known of its input"
        raise FtcliError.single("FT740", message, help="use export.formats: [fp8], which needs no calibration")
    widest = max((plan.base.shape(name)[1] for name in rounded.values()), default=0)
    few = (
        f"{tokens:,} tokens of {len(rows)} rows calibrate layers of {widest:,} inputs, which need more tokens than that"
    )
    help = "raise export.calibration.rows or row_tokens, or give the run more data"
    return Calibrated(
        files={key: file for file in map(TensorFile, sorted(folder.iterdir())) for key in file.entries},
        given=walk.given,
        rows=walk.rows,
        columns=walk.columns,
        norms=walk.norms,
        facts={"calibration_rows": len(rows), "calibration_tokens": tokens, **walk.facts()},
        warnings=(Finding("FT779", few, help=help, severity="warning"),) if tokens < widest else (),
    )


def importance(source: ExportSource, plan: ModelPlan, say: Callable[[str], None]) -> dict[str, tuple[Tensor, int]]:
    """For each linear layer of the decoder the sum of the squares of each of its inputs (I,), over so many tokens.

    Raises FtcliError as :func:`calibration_rows`.
    """
    rows = calibration_rows(source)
    say(f"weighing inputs with {len(rows)} rows of {sum(map(len, rows)):,} tokens")
    model: Any = unwritten(plan.config)
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and id(each) in inside]
    walk = _Walk(plan, {f"{name}.weight": "" for name in linears}, None, None, rows, say)
    walk.run()
    return walk.importance


class _Finished(Exception):
    """The last decoder layer has answered: what comes behind it is of no interest."""


class _Standing(nn.Module):
    """Stands in a decoder layer's place. The layer is none of its modules: nobody else fills in its weights."""

    def __init__(self, layer: nn.Module, work: Callable[..., Any]) -> None:
        super().__init__()
        object.__setattr__(self, "held", (layer, work))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["held"][0], name)

    def forward(self, *given: Any, **named: Any) -> Any:
        layer, work = self.__dict__["held"]
        return work(layer, given, named)


@dataclass(slots=True)
class _Inputs:
    """Statistics of an input that linear layers share, gathered batch by batch.

    Attributes:
        norm: The name there of the norm that hands it on; None where none does.
    """

    linears: list[str]
    norm: str | None
    tokens: int = 0
    largest: Tensor | None = None
    total: Tensor | None = None
    squares: Tensor | None = None
    products: Tensor | None = None
    sample: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, sampled: int, *, products: bool) -> None:
        """``x``: (tokens, I) in float32."""
        largest, total, squares = x.abs().amax(0), x.abs().sum(0), x.square().sum(0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.total = total if self.total is None else self.total + total
        self.squares = squares if self.squares is None else self.squares + squares
        self.tokens += len(x)
        self.sample.append(x[:: max(1, len(x) // sampled)][:sampled].clone())
        if products:
            products_of = x.T @ x
            self.products = products_of if self.products is None else self.products.add_(products_of)

    def divide(self, factors: Tensor) -> None:
        """As they are once what hands them on is divided."""
        assert self.largest is not None
        assert self.total is not None
        self.largest, self.total = self.largest / factors, self.total / factors
        self.sample = [each / factors for each in self.sample]


class _Observer:
    """Gathers what the linear layers of a decoder layer are given.

    Args:
        sampled: Tokens of each batch that are kept.
    """

    def __init__(self, linears: Collection[str], products: bool, sampled: int) -> None:
        self.found: dict[str, _Inputs] = {}
        self._linears, self._products, self._sampled = linears, products, sampled
        # By their ids; kept, so that no other tensor gets one of these.
        self._handed: dict[int, tuple[Tensor, str]] = {}
        self._taken: dict[int, tuple[Tensor, str]] = {}

    def begin(self, real: Tensor) -> None:
        """Of the next batch, ``real`` (rows, tokens) are no padding."""
        self._real = real
        self._handed.clear()
        self._taken.clear()

    @contextmanager
    def watching(self, layer: nn.Module) -> Iterator[None]:
        """While it is entered, each forward pass of ``layer`` is looked at."""
        handles: list[Any] = []
        for name, module in layer.named_modules():
            if name in self._linears:
                handles.append(module.register_forward_pre_hook(partial(self._take, name)))
            elif [leaf for leaf, held in module._parameters.items() if held is not None] == ["weight"]:
                handles.append(module.register_forward_hook(partial(self._hand_on, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hand_on(self, name: str, _module: nn.Module, _given: object, output: Any) -> None:
        self._handed[id(output)] = (output, name)

    def _take(self, name: str, _module: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0]
        leader = self._taken.setdefault(id(x), (x, name))[1]
        if leader == name:
            norm = self._handed[id(x)][1] if id(x) in self._handed else None
            inputs = self.found.setdefault(name, _Inputs([], norm))
            inputs.add(_rows(x, self._real), self._sampled, products=self._products)
        if name not in self.found[leader].linears:
            self.found[leader].linears.append(name)


class _Walk:
    """The way of the rows through the decoder layers."""

    def __init__(
        self,
        plan: ModelPlan,
        keys: Mapping[str, str],
        scheme: Scheme | None,
        folder: Path | None,
        rows: Sequence[Sequence[int]],
        say: Callable[[str], None],
    ) -> None:
        self.importance: dict[str, tuple[Tensor, int]] = {}
        self.given: dict[str, Given] = {}
        self.rows: dict[str, Tensor] = {}
        self.columns: dict[str, Tensor] = {}
        self.norms: dict[str, Tensor] = {}
        self._plan, self._keys, self._scheme, self._folder, self._say = plan, keys, scheme, folder, say
        self._asked = (scheme.calibration if scheme is not None else None) or Calibration()
        self._device = torch.device("cuda", 0) if probe_device().kind == "cuda" else torch.device("cpu")
        self._ids = pad_sequence([torch.tensor(row) for row in rows], True)
        self._real = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], True)
        self._at_once = max(1, _TOKENS // self._ids.shape[1])
        #: What layers hand on beside their output, by rows and argument.
        self._shared: dict[tuple[range, str], dict[Any, Any]] = {}
        self._errors: list[tuple[float, float]] = []

    def facts(self) -> dict[str, float]:
        """Relative error of the outputs of linear layers on the sample: as they are rounded, and without the rows."""
        if not self._errors:
            return {}
        ours, plain = (sum(column) / len(self._errors) for column in zip(*self._errors, strict=True))
        return {"output_error": ours**0.5, "output_error_uncalibrated": plain**0.5}

    @torch.no_grad()
    def run(self) -> None:
        model: Any = unwritten(self._plan.config)
        layers = decoder_layers(model)
        names = {id(module): name for name, module in model.named_modules()}
        for at, layer in enumerate(list(layers)):
            name, last = names[id(layer)], at == len(layers) - 1
            layers[at] = _Standing(layer, lambda *asked, n=name, i=at, end=last: self._layer(n, i, end, *asked))
        # Padding comes behind what it pads, where nothing looks at it: no mask is needed.
        with computing_from(model, self._read, self._plan.base.names):
            try:
                model(input_ids=self._ids, use_cache=False)
            except _Finished:
                return
        raise AssertionError("the last decoder layer did not answer")

    def _read(self, name: str) -> Tensor:
        return self._plan.adapter.merged(name, self._plan.base.read(name)).float()

    def _layer(self, name: str, at: int, last: bool, layer: nn.Module, given: Any, named: Any) -> Any:
        count = len(self._real)
        if at % 8 == 0:
            self._say(f"calibrating: decoder layer {at + 1}")
        spans = [range(first, min(first + self._at_once, count)) for first in range(0, count, self._at_once)]
        linears = {key.removeprefix(f"{name}.").removesuffix(".weight") for key in self._keys}
        whole: Any = None
        observer = _Observer(linears, self._asked.products, -(-_SAMPLE // len(spans)))
        with self._filled(layer, name):
            with observer.watching(layer):
                for span in spans:
                    observer.begin(self._real[span.start : span.stop].to(self._device))
                    batch, arguments = self._batch(given, named, span)
                    answer = layer(*batch, **arguments)
                    whole = _kept(whole, answer, span, count) if self._scheme is None else None
            seen = list(observer.found.values())
            if self._asked.smoothing is not None:
                self._smooth(layer, name, seen, self._asked.smoothing, self._batch(given, named, range(1)))
            if self._scheme is None:
                self._weigh(name, seen)
            else:
                self._round(layer, name, seen, self._scheme)
            if last:
                raise _Finished
            for span in spans if self._scheme is not None else ():
                batch, arguments = self._batch(given, named, span)
                whole = _kept(whole, layer(*batch, **arguments), span, count)
        return whole

    @contextmanager
    def _filled(self, layer: nn.Module, prefix: str) -> Iterator[None]:
        """The layer with its weights, on the device; without them afterwards."""
        held: list[tuple[nn.Module, str, nn.Parameter]] = []
        for path, module in layer.named_modules():
            for leaf, parameter in list(module._parameters.items()):
                if parameter is not None:
                    weight = self._read(".".join(filter(None, (prefix, path, leaf))))
                    held.append((module, leaf, parameter))
                    module._parameters[leaf] = nn.Parameter(weight.to(self._device), requires_grad=False)
            for leaf, buffer in list(module._buffers.items()):
                full = ".".join(filter(None, (prefix, path, leaf)))
                if buffer is not None:
                    value = self._plan.base.read(full).to(buffer.dtype) if full in self._plan.base.names else buffer
                    module._buffers[leaf] = value.to(self._device)
        try:
            yield
        finally:
            for module, leaf, parameter in held:
                module._parameters[leaf] = parameter

    def _batch(self, given: Any, named: Any, span: range) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of some of the rows, on the device."""
        count = len(self._real)

        def part(value: Any) -> Any:
            if isinstance(value, Tensor):
                mine = value.dim() > 1 and value.shape[0] == count
                return (value[span.start : span.stop] if mine else value).to(self._device)
            if isinstance(value, tuple | list):
                return type(value)(part(each) for each in value)
            return value

        arguments = {}
        for key, value in named.items():
            if isinstance(value, MutableMapping):  # what layers leave there for later ones stays with the rows
                held = {name: part(each) for name, each in value.items()}
                arguments[key] = self._shared.setdefault((span, key), held)
            else:
                arguments[key] = part(value)
        return [part(each) for each in given], arguments

    def _smooth(
        self, layer: nn.Module, prefix: str, seen: Sequence[_Inputs], how: Smoothing, probe: tuple[Any, Any]
    ) -> None:
        """Looks for factors, and puts them into the layer's weights."""
        given, named = probe
        before = _first(layer(*given, **named))
        for inputs in seen:
            front = None if inputs.norm is not None else _in_front(layer, inputs.linears)
            weights = [_weight(layer, name) for name in inputs.linears]
            factors = (
                _factors(weights, inputs, how, self._rounded) if inputs.norm is not None or front is not None else None
            )
            if factors is None:
                continue
            for owner, new, exact in self._divided(layer, prefix, inputs.norm, front, factors):
                changed = [(owner, new), *((weight, weight * exact) for weight in weights)]
                kept = [(weight, weight.data) for weight, _ in changed]
                for weight, value in changed:
                    weight.data = value
                moved = (_first(layer(*given, **named)) - before).norm()
                if float(moved) <= _SAME * float(before.norm()):
                    self._note(prefix, inputs, front, owner, exact)
                    break
                for weight, value in kept:
                    weight.data = value

    def _rounded(self, weight: Tensor) -> Tensor:
        assert self._scheme is not None
        return self._scheme.decode(self._scheme.encode(weight, None))

    def _divided(
        self, layer: nn.Module, prefix: str, norm: str | None, front: str | None, factors: Tensor
    ) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """Ways to divide what comes in: the weight in front, that weight divided, and the factors that this makes."""
        if front is not None:
            weight = _weight(layer, front)
            yield weight, weight / factors[:, None], factors
        if norm is None:
            return
        weight, name = _weight(layer, norm), f"{prefix}.{norm}.weight"
        dtype = self._plan.rounding.of(name, self._plan.base.of(name))
        for offset in (0.0, 1.0):  # some families' norms multiply by one more than their weight
            whole = weight + offset
            stored = (whole / factors - offset).to(dtype).float()
            exact = whole / (stored + offset)
            yield weight, stored, torch.where(torch.isfinite(exact) & (exact > 0), exact, 1.0)

    def _note(self, prefix: str, inputs: _Inputs, front: str | None, owner: nn.Parameter, exact: Tensor) -> None:
        inputs.divide(exact)
        for name in inputs.linears:
            self.columns[f"{prefix}.{name}.weight"] = exact.cpu()
        if front is not None:
            self.rows[f"{prefix}.{front}.weight"] = (1 / exact).cpu()
        else:
            self.norms[f"{prefix}.{inputs.norm}.weight"] = owner.data.cpu()

    def _weigh(self, prefix: str, seen: Sequence[_Inputs]) -> None:
        for inputs in seen:
            assert inputs.squares is not None
            told = inputs.squares.cpu(), inputs.tokens
            self.importance |= {f"{prefix}.{name}.weight": told for name in inputs.linears}

    def _round(self, layer: nn.Module, prefix: str, seen: Sequence[_Inputs], scheme: Scheme) -> None:
        """Rounds the layer's weights, and writes them."""
        parts: dict[str, Tensor] = {}
        for inputs in seen:
            assert inputs.largest is not None
            peak = max(float(_weight(layer, name).abs().max()) for name in inputs.linears)
            products = None if inputs.products is None else inputs.products / inputs.tokens
            given = Given(float(inputs.largest.max()), peak, products)
            for name in inputs.linears:
                weight, full = _weight(layer, name), f"{prefix}.{name}.weight"
                made = scheme.encode(weight.data, given)
                rounded = scheme.decode(made)
                self._compare(full, weight.data, rounded, torch.cat(inputs.sample))
                weight.data = rounded
                key = self._keys[full].removesuffix("weight")
                parts |= {f"{key}{leaf}": tensor.cpu().contiguous() for leaf, tensor in made.items()}
                self.given[full] = replace(given, products=None)
        if parts and self._folder is not None:
            save_file(parts, self._folder / f"{prefix}.safetensors")

    def _compare(self, name: str, weight: Tensor, rounded: Tensor, sample: Tensor) -> None:
        """Notes the squared error of a layer's outputs beside that of rounding alone, in shares of what they are."""
        if not self._asked.products and self._asked.smoothing is None:
            return
        some = slice(None, None, -(-weight.shape[0] // _TRIED_ROWS))
        columns = self.columns.get(name)
        plain, x = weight[some], sample
        if columns is not None:
            columns = columns.to(weight.device)
            plain, x = plain / columns, sample * columns
        inputs = None if self._asked.smoothing is None else self._asked.smoothing.inputs
        wanted = plain @ x.T
        size = float(wanted.square().sum()) or 1.0
        alone = self._rounded(plain)
        errors = (
            float((ours @ (given if inputs is None else inputs(given)).T - wanted).square().sum()) / size
            for ours, given in ((rounded[some], sample), (alone, x))
        )
        self._errors.append((next(errors), next(errors)))


def _factors(
    weights: Sequence[Tensor], inputs: _Inputs, how: Smoothing, exactly: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The factors (I,) that leave the least error of the outputs on the sample; None where nothing is gained."""
    x = torch.cat(inputs.sample)
    tried = [weight[:: -(-weight.shape[0] // _TRIED_ROWS)] for weight in weights]
    stacked = torch.cat([weight.abs() for weight in weights])
    assert inputs.largest is not None
    assert inputs.total is not None
    if how.statistic == "mean":
        sizes, heights = inputs.total / inputs.tokens, stacked.mean(0)
    else:
        sizes, heights = inputs.largest, stacked.amax(0)
    there = (sizes > 0) & (heights > 0)
    sizes, heights = torch.where(there, sizes, 1.0), torch.where(there, heights, 1.0)
    wanted = [weight @ x.T for weight in tried]

    def error(factors: Tensor, rounded: Callable[[Tensor], Tensor]) -> float:
        given = x / factors if how.inputs is None else how.inputs(x / factors)
        made = (rounded(weight * factors) @ given.T for weight in tried)
        return sum(float((one - other).square().sum()) for one, other in zip(made, wanted, strict=True))

    def scaled(exponent: float) -> Tensor:
        factors = torch.where(there, sizes**exponent / heights ** (1 - exponent), 1.0).clamp(1e-4, 1e4)
        return factors / (factors.max() * factors.min()).sqrt()

    best = min(map(scaled, _EXPONENTS), key=lambda factors: error(factors, how.weights))
    return best if error(best, exactly) < error(torch.ones_like(sizes), exactly) else None


def _in_front(layer: nn.Module, linears: Sequence[str]) -> str | None:
    """The linear layer without a bias whose rows can be divided by factors of the input of ``linears``."""
    for front, behind in _IN_A_ROW:
        if len(linears) == 1 and linears[0].rpartition(".")[2] == behind:
            name = f"{linears[0].removesuffix(behind)}{front}"
            module = dict(layer.named_modules()).get(name)
            if isinstance(module, nn.Linear) and getattr(module, "bias", None) is None:
                return name
    return None


def _weight(layer: nn.Module, name: str) -> nn.Parameter:
    return layer.get_parameter(f"{name}.weight")


def _rows(x: Tensor, real: Tensor) -> Tensor:
    """The rows (tokens, I) of ``x`` that are no padding."""
    if x.shape[: real.dim()] == real.shape:
        return x[real].float()
    flat = x.flatten(0, -2).float()
    return flat[real.flatten()] if len(flat) == real.numel() else flat


def _first(answer: Any) -> Tensor:
    found: Tensor = answer if isinstance(answer, Tensor) else answer[0]
    return found


def _kept(whole: Any, answer: Any, span: range, count: int) -> Any:
    """``answer`` of some rows in its place among those of all, in the host's memory."""
    if isinstance(answer, Tensor):
        if whole is None:
            whole = torch.empty((count, *answer.shape[1:]), dtype=answer.dtype)
        whole[span.start : span.stop] = answer.cpu()
        return whole
    if isinstance(answer, tuple):
        held = whole if whole is not None else (None,) * len(answer)
        return tuple(_kept(one, part, span, count) for one, part in zip(held, answer, strict=True))
    return answer
