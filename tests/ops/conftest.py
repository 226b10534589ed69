"""One body of tests, two tiers: Triton's interpreter on the CPU, and compiled kernels on a GPU (``-m gpu``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ftkernels.device import interpreting
from ftkernels.lora_linear import lora_linear, lora_linear_reference
from ftkernels.lora_mlp import lora_mlp, lora_mlp_reference
from ftkernels.lora_qkv import lora_qkv, lora_qkv_reference
from ftkernels.projection import Norm, Projection
from torch import Tensor


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run; every test asks for ``backend="triton"`` on it."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")
    if request.param == "cpu" and not interpreting():
        pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")
    return str(request.param)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN: an element that a kernel forgets to write is seen."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoning(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            with torch.no_grad():
                return out.fill_(float("nan")) if out.is_floating_point() and not out.is_meta else out

        return poisoning

    # torch remembers which functions make tensors at the first use of a device context: it must find the true ones.
    with torch.device("cpu"):
        torch.zeros(0)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same numbers in every run, whatever ran before."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


@dataclass(frozen=True)
class Compared:
    """Relative errors of an operation's outputs and gradients, and those of plain torch in the same dtype."""

    errors: list[float]
    torch_errors: list[float]

    @property
    def error(self) -> float:
        """The largest."""
        return max(self.errors)

    @property
    def torch_error(self) -> float:
        """The largest of plain torch."""
        return max(self.torch_errors)


class Tools:
    """Comparison of an operation with its reference in float64, outputs and all gradients."""

    @staticmethod
    def relative(value: Tensor, exact: Tensor) -> float:
        """Frobenius norm of the difference over that of the exact value."""
        scale = exact.double().norm().clamp(min=1e-30)
        return float((value.double() - exact.double()).norm() / scale)

    def run(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        gradients: bool = True,
    ) -> list[Tensor]:
        """Outputs of ``function(*inputs)`` and, for random incoming gradients, the inputs' gradients."""
        leaves = [t.detach().to(d).requires_grad_(t.is_floating_point()) for t, d in zip(inputs, dtypes, strict=True)]
        out = function(*leaves)
        outputs = list(out) if isinstance(out, tuple) else [out]
        if not gradients:
            return [o.detach() for o in outputs]
        generator = torch.Generator().manual_seed(7)
        incoming = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]
        grads = torch.autograd.grad(outputs, leaves, incoming)
        return [*(o.detach() for o in outputs), *grads]

    def compare(
        self,
        function: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: Sequence[Tensor],
        dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    ) -> Compared:
        """``function`` in ``dtype`` (one, or one an input) against ``reference`` in float64 on the same rounded
        inputs.
        """
        dtypes = [dtype] * len(inputs) if isinstance(dtype, torch.dtype) else list(dtype)
        rounded = [t.to(d) for t, d in zip(inputs, dtypes, strict=True)]
        exact = self.run(reference, rounded, [torch.float64] * len(inputs))
        got = self.run(function, rounded, dtypes)
        plain = self.run(reference, rounded, dtypes)
        for value, truth in zip(got, exact, strict=True):
            assert value.shape == truth.shape
            assert torch.isfinite(value).all()
        return Compared(
            [self.relative(g, e) for g, e in zip(got, exact, strict=True)],
            [self.relative(p, e) for p, e in zip(plain, exact, strict=True)],
        )

    def assert_float32(self, *args: Any) -> None:
        """Relative error at most 1e-5 in float32."""
        compared = self.compare(*args)
        assert compared.error <= 1e-5, compared

    def assert_bfloat16(self, *args: Any) -> None:
        """At most 1.5 times the error of plain torch in the same dtypes, and at most 1e-2."""
        compared = self.compare(*args)
        assert compared.error <= max(1.5 * compared.torch_error, 1e-6), compared
        assert compared.error <= 1e-2, compared

    def assert_bfloat16_in_the_mean(
        self, function: Callable[..., Any], reference: Callable[..., Any], draws: Sequence[Sequence[Tensor]]
    ) -> None:
        """``assert_bfloat16`` of the mean error over ``draws`` of the inputs, for each output and gradient by itself.

        For the weights of norms, of which a draw says nothing: a sum of ten rounded products that nearly cancel is off
        by up to twice as much as torch's, or half as much, as it happens (24 draws on an H200; in the mean 1.00).
        """
        compared = [self.compare(function, reference, inputs, torch.bfloat16) for inputs in draws]
        ours, theirs = (
            [sum(of) / len(draws) for of in zip(*all_, strict=True)]
            for all_ in ([each.errors for each in compared], [each.torch_errors for each in compared])
        )
        for error, torch_error in zip(ours, theirs, strict=True):
            assert error <= max(1.5 * torch_error, 1e-6), (ours, theirs)
            assert error <= 1e-2, (ours, theirs)


@pytest.fixture
def tools() -> Tools:
    """The comparison helpers."""
    return Tools()


@dataclass(frozen=True)
class Layer:
    """Shapes and settings of one projection, and its tensors as float32 masters."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    scaling: float

    def build(self, a: Tensor | None, b: Tensor | None, like: Tensor) -> Projection:
        """The projection with these adapter leaves, its base in float64 when ``like`` is, else in ``like``'s dtype."""
        weight = self.weight.to(like.dtype)
        return Projection(weight, None if self.bias is None else self.bias.to(like.dtype), a, b, self.scaling)


class Layers:
    """Makes projections, and functions of flat tensors out of operations on projections."""

    def __init__(self, device: str) -> None:
        self.device = device

    def make(
        self, out_features: int, in_features: int, rank: int, *, bias: bool = False, scaling: float = 2.0
    ) -> Layer:
        """A layer whose outputs are of order one; rank 0 has no adapter."""
        at = {"device": self.device}
        weight = torch.randn(out_features, in_features, **at) / in_features**0.5
        return Layer(
            weight,
            torch.randn(out_features, **at) if bias else None,
            torch.randn(rank, in_features, **at) / in_features**0.5 if rank else None,
            torch.randn(out_features, rank, **at) / max(rank, 1) ** 0.5 if rank else None,
            scaling,
        )

    def flat(self, *layers: Layer) -> list[Tensor]:
        """The adapters' tensors in order."""
        return [t for layer in layers for t in (layer.a, layer.b) if t is not None]

    def function(
        self,
        operation: Callable[..., Any],
        layers: Sequence[Layer],
        *,
        norm: bool = False,
        form: Any = "llama",
        **kwargs: Any,
    ) -> Callable[..., Any]:
        """``f(z, [norm weight], *adapters)`` calling ``operation(z, *projections, **kwargs)``; the base weights take
        z's dtype.
        """

        def call(z: Tensor, *rest: Tensor) -> Any:
            leaves = list(rest)
            extra = dict(kwargs)
            if norm:
                extra["norm"] = Norm(leaves.pop(0), 1e-5, form)
            built = [
                layer.build(*((leaves.pop(0), leaves.pop(0)) if layer.a is not None else (None, None)), like=z)
                for layer in layers
            ]
            extra = {
                key: tuple(t.to(z.dtype) for t in value) if key == "rope" and value is not None else value
                for key, value in extra.items()
            }
            return operation(z, *built, **extra)

        return call

    def three(self) -> list[tuple[str, Any, Any, list[Layer], dict[str, Any]]]:
        """The three operations behind a norm of width 64: (name, operation, reference, layers, options)."""
        qkv = [self.make(n * 16, 64, 4) for n in (4, 2, 2)]
        mlp = [self.make(96, 64, 4), self.make(96, 64, 4), self.make(64, 96, 4)]
        heads = {"head_dim": 16, "rope": self.angles(16), "norm": True}
        return [
            ("linear", lora_linear, lora_linear_reference, [self.make(64, 64, 4)], {"norm": True}),
            ("qkv", lora_qkv, lora_qkv_reference, qkv, heads),
            ("mlp", lora_mlp, lora_mlp_reference, mlp, {"norm": True, "residual": "add"}),
        ]

    def angles(self, features: int) -> tuple[Tensor, Tensor]:
        """cos and sin of 2 rows of 5 tokens, of which sin is the same for both rows."""
        cos = torch.randn(2, 5, features, device=self.device)
        return cos, torch.randn(1, 5, features, device=self.device).expand(2, 5, features)


@pytest.fixture
def layers(device: str) -> Layers:
    """Makes projections on the device under test."""
    return Layers(device)
