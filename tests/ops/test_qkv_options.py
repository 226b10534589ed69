"""Options of the epilogue of a QKV projection: what is normalised, when, by which weights, and what is rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton.language as tl
from ftkernels.device import Tile
from ftkernels.lora_qkv import lora_qkv, lora_qkv_reference
from ftkernels.projection import Norm, Projection
from ftkernels.qkv_norm_rope import qkv_norm_rope_backward, qkv_norm_rope_forward
from ftkernels.qkv_parts import HeadNorms, Rotary
from ftkernels.rms_norm import rms_norm_reference
from ftkernels.rope import apply_rope, apply_rope_reference
from torch import Tensor
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_pairs
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_halves

from tests.tiers import in_turn

BF16 = torch.bfloat16
HIDDEN = 40


@dataclass(frozen=True)
class Options:
    """The options of one call. ``rotated``: features of a head that are rotated, 0 for no rotation."""

    norms: str = "weighted"
    span: Any = "head"
    after: bool = False
    rotated: int = 16
    layout: Any = "halves"
    form: Any = "llama"
    head: int = 16
    heads: tuple[int, int] = (4, 2)
    rank: int = 4
    joined: bool = False

    def norm_sizes(self) -> list[int]:
        return [self.head * (n if self.span == "width" else 1) for n in self.heads]


CASES = {
    "width": Options(span="width", form="plain"),
    "width, llama": Options(span="width", heads=(3, 1)),
    "width, pairs, gemma": Options(span="width", layout="pairs", form="gemma"),
    "width, after": Options(span="width", after=True, form="plain"),
    "width, part": Options(span="width", rotated=12, form="plain"),
    "width, still": Options(span="width", rotated=0, form="plain", rank=0),
    "width, bare": Options(span="width", norms="bare", heads=(5, 5), rank=0),
    "width, high rank": Options(span="width", form="plain", rank=80),
    "head, plain": Options(form="plain"),
    "after": Options(after=True),
    "after, gemma, pairs, part": Options(after=True, form="gemma", layout="pairs", rotated=8, head=24),
    "bare": Options(norms="bare"),
    "bare, one": Options(norms="bare q"),
    "still": Options(rotated=0),
    "still, bare": Options(rotated=0, norms="bare", rank=0),
    "part": Options(rotated=6, head=20),
    "pairs": Options(layout="pairs"),
    "pairs, high rank": Options(layout="pairs", rank=80),
    "pairs, no norms": Options(layout="pairs", norms="none"),
    "pairs, no norms, frozen": Options(layout="pairs", norms="none", rank=0, heads=(5, 1)),
    "pairs, part, no norms": Options(layout="pairs", norms="none", rotated=8, head=24),
    "part, no norms": Options(norms="none", rotated=12),
    "part, no norms, odd": Options(norms="none", rotated=6, head=20, heads=(3, 1), rank=0),
    "joined, width, part": Options(span="width", rotated=12, form="plain", joined=True),
    "joined, pairs, part, no norms": Options(layout="pairs", norms="none", rotated=8, head=24, joined=True),
    "joined, after": Options(after=True, joined=True),
}


class Call:
    """``function`` of z, the weights of the norms, and adapters (or weights without), under ``options``."""

    def __init__(self, options: Options, layers: Any, device: str) -> None:
        o, at = options, {"device": device}
        self.options = o
        q, k = (n * o.head for n in o.heads)
        sizes = (q + 2 * k,) if o.joined else (q, k, k)
        self.made = [layers.make(n, HIDDEN, o.rank, bias=True) for n in sizes]
        weights = [torch.randn(n, **at) for n in o.norm_sizes()] if o.norms == "weighted" else []
        if o.norms == "bare q":
            weights = [torch.randn(o.head, **at)]
        trained = layers.flat(*self.made) if o.rank else [layer.weight for layer in self.made]
        self.inputs = [torch.randn(2, 5, HIDDEN, **at), *weights, *trained]
        self.norms = len(weights)
        self.rope = layers.angles(o.rotated) if o.rotated else None

    def of(self, function: Any, **kwargs: Any) -> Any:
        o = self.options

        def call(z: Tensor, *rest: Tensor) -> Any:
            weights: list[Tensor | None] = list(rest[: self.norms])
            weights = [None] * (2 - len(weights)) + weights
            trained = rest[self.norms :]
            if o.rank:
                pairs = zip(trained[::2], trained[1::2], strict=True)
                built = [layer.build(a, b, z) for layer, (a, b) in zip(self.made, pairs, strict=True)]
            else:
                built = [Projection(w) for w in trained]
            norms = None if o.norms == "none" else tuple(Norm(w, 1e-5, o.form) for w in weights)
            return function(
                z,
                *built,
                head_dim=o.head,
                kv_heads=o.heads[1],
                head_norms=norms,
                norm_span=o.span,
                norm_after_rope=o.after,
                rope=None if self.rope is None else tuple(t.to(z.dtype) for t in self.rope),
                rope_layout=o.layout,
                **kwargs,
            )

        return call


@pytest.mark.parametrize("name", CASES)
def test_every_option_matches_float64(device: str, tools: Any, layers: Any, name: str) -> None:
    call = Call(CASES[name], layers, device)
    op, reference = call.of(lora_qkv, backend="triton"), call.of(lora_qkv_reference)
    tools.assert_float32(op, reference, call.inputs)
    tools.assert_bfloat16(op, reference, call.inputs, BF16)


@pytest.mark.parametrize("name", ["width", "after", "bare, one", "part", "pairs"])
def test_plain_torch_matches_too(tools: Any, layers: Any, device: str, name: str) -> None:
    call = Call(CASES[name], layers, device)
    tools.assert_float32(call.of(lora_qkv, backend="torch"), call.of(lora_qkv_reference), call.inputs)


@pytest.mark.parametrize("name", ["width", "after", "pairs"])
def test_no_rows(device: str, layers: Any, name: str) -> None:
    call = Call(CASES[name], layers, device)
    leaves = [t.detach().requires_grad_() for t in (call.inputs[0][:, :0], *call.inputs[1:])]
    call.rope = tuple(t[:, :0] for t in call.rope)
    made = call.of(lora_qkv, backend="triton")(*leaves)
    assert [tuple(t.shape) for t in made[:3]] == [(2, n, 0, 16) for n in (4, 2, 2)]
    grads = torch.autograd.grad(sum(t.sum() for t in made), leaves)
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("name", ["width", "after, gemma, pairs, part", "part, no norms"])
def test_twice_the_same_bits(device: str, tools: Any, layers: Any, name: str) -> None:
    call = Call(CASES[name], layers, device)
    dtypes = [BF16] * len(call.inputs)
    inputs = [t.to(BF16) for t in call.inputs]
    first, second = (tools.run(call.of(lora_qkv, backend="triton"), inputs, dtypes) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("option", "tile"),
    in_turn(
        [("width", False, 16, False), ("width", False, 0, False), ("head", True, 8, True), ("head", False, 12, False)],
        [Tile(16, 1, 4), Tile(16, 8, 4), Tile(32, 3, 4)],
    ),
)
def test_every_tile_writes_every_element(
    device: str, tools: Any, option: tuple[Any, bool, int, bool], tile: Tile
) -> None:
    """37 rows and 5 + 2 heads fill no tile; gradients come in any strides."""
    span, after, rotated, pairs = option
    tokens, heads, k_heads, head = 37, 5, 2, 16
    sizes = [head * n if span == "width" else head for n in (heads, k_heads)]
    y = torch.randn(tokens, (heads + 2 * k_heads) * head, device=device)
    angle = torch.randn(1, tokens, rotated, device=device) if rotated else None
    rotary = Rotary(*(None if angle is None else f(angle) for f in (torch.cos, torch.sin)), heads, k_heads, head, pairs)
    norms = HeadNorms(*(torch.randn(n, device=device) for n in sizes), 1e-6, "plain", span, after)

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        if rotary.cos is None or rotary.sin is None:
            return q, k
        angles = rotary.cos.double(), rotary.sin.double()
        return apply_rope_reference(q, k, *angles, layout="pairs" if pairs else "halves")

    def normed(x: Tensor, w: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(2) if span == "width" else x
        found = rms_norm_reference(rows, w, 1e-6, form="plain")
        return found.unflatten(-1, (-1, head)).transpose(1, 2) if span == "width" else found

    def reference(y: Tensor, wq: Tensor, wk: Tensor) -> tuple[Tensor, ...]:
        q, k, v = y.view(1, tokens, -1, head).transpose(1, 2).split([heads, k_heads, k_heads], 1)
        if after:
            q, k = turned(q, k)
        q, k = normed(q, wq), normed(k, wk)
        return (*((q, k) if after else turned(q, k)), v)

    leaves = [t.double().requires_grad_() for t in (y, norms.q, norms.k) if t is not None]
    exact = reference(*leaves)
    incoming = [torch.randn(tokens, 1, n, head, device=device).permute(1, 2, 0, 3) for n in (heads, k_heads, k_heads)]
    wanted = torch.autograd.grad(exact, leaves, [g.double() for g in incoming])
    found, left = qkv_norm_rope_forward(y, None, None, rotary, norms, tile=tile)
    both = found.view(1, tokens, -1, head).transpose(1, 2)
    assert tools.relative(both, torch.cat(exact[:2], 1).detach()) <= 1e-6
    assert torch.equal(left, y)
    dq, dk, dv = incoming
    made = qkv_norm_rope_backward((dq, dk, dv), y, None, rotary, norms, torch.float32, want_dw=True, tile=tile)
    for grad, true in zip((made.d, made.dw_q, made.dw_k), wanted, strict=True):
        assert grad is not None
        assert tools.relative(grad, true) <= 1e-6


def test_llama_queries_are_rounded_over_the_width_bit_for_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``test_qkv_norm_rope`` has it of heads: the mean square of all heads is 9, that of single ones is not."""
    if device == "cpu":
        for name in ("qkv_norm_rope", "qkv_backward"):
            monkeypatch.setattr(f"ftkernels.{name}.triton_store_dtype", lambda _: tl.float16)
    row = torch.tensor([5.0, -5.0, 4.0, 1.0, -1.0, 2.0, 0.0, 0.0]).repeat_interleave(4)  # two heads of 16
    y = torch.cat([row, row, row]).repeat(3, 1).to(device, torch.float16)
    wq, wk = (torch.randn(32, device=device, dtype=torch.float16) for _ in range(2))
    norms = HeadNorms(wq, wk, 1e-6, "llama", "width")
    rotary = Rotary(None, None, 2, 2, 16)
    found, left = qkv_norm_rope_forward(y, None, None, rotary, norms)
    n = (y[:, :64].float() / 3.0).to(torch.float16)
    assert torch.equal(found, n * torch.cat([wq, wk]))
    ones = torch.ones(1, 2, 3, 16, device=device, dtype=torch.float16)
    made = qkv_norm_rope_backward((ones, ones, ones), left, None, rotary, norms, torch.float16, want_dw=True)
    assert made.dw_q is not None
    assert torch.equal(made.dw_q.float(), 3.0 * n[0, :32].float())


@pytest.mark.parametrize(("rotated", "head"), [(16, 16), (8, 16), (12, 24)])
@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_rotations_are_those_of_transformers(device: str, layout: Any, rotated: int, head: int) -> None:
    """Also behind a projection, which is the identity here."""
    half = torch.rand(2, 3, rotated // 2, device=device) * 6
    angle = torch.cat((half, half), -1)
    cos, sin = angle.cos(), angle.sin()
    z = torch.randn(2, 3, 4 * head, device=device)
    q, k, v = (t.unflatten(-1, (-1, head)).transpose(1, 2) for t in z.split([2 * head, head, head], -1))
    wanted = (rotate_pairs if layout == "pairs" else rotate_halves)(q, k, cos, sin)
    for found, true in zip(apply_rope(q, k, cos, sin, layout=layout, backend="triton"), wanted, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-6, atol=1e-6)
    eye = torch.eye(4 * head, device=device).split([2 * head, head, head])
    options = {"head_dim": head, "rope": (cos, sin), "rope_layout": layout, "backend": "triton"}
    made = lora_qkv(z, *(Projection(w) for w in eye), **options)
    for found, true in zip(made, (*wanted, v, z), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_span": "row"}, "unknown norm span 'row'"),
        ({"rope_layout": "thirds"}, "rope layout 'thirds'"),
        ({"norm_span": "width"}, r"norms of 32 and 16 features with weights of \(16,\), \(16,\)"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    norm = Norm(torch.ones(16), 1e-6)
    weights = [Projection(torch.randn(n * 16, 32)) for n in (2, 1, 1)]
    with pytest.raises(ValueError, match=message):
        lora_qkv(torch.randn(1, 3, 32), *weights, head_dim=16, head_norms=(norm, norm), **options)


def test_unknown_layouts_of_heads_are_named() -> None:
    x, angle = torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8)
    with pytest.raises(ValueError, match="'halves' or 'pairs', got 'thirds'"):
        apply_rope(x, x, angle, angle, layout="thirds")  # type: ignore[arg-type]
