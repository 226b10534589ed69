"""Times every operation forward and backward against plain torch, torch.compile, Liger, TRL and FLA where installed.

    python kernels/bench/ops.py                                    # both models, 2 x 4096 tokens
    python kernels/bench/ops.py --models llama3.1-8b --only lora --compile --json out.json
    python kernels/bench/ops.py --models llama3.1-8b --only log_prob --batch 8 --seq 20000 --rounds 2
    python kernels/bench/ops.py --models llama3.1-8b --only divergence --batch 8
    python kernels/bench/ops.py --models llama3.1-8b --only delta  # gated delta nets, of Qwen3.5-9B's heads
    python kernels/bench/ops.py --device cpu                       # does it run at all

Medians of interleaved rounds by CUDA events. Percentages are of the copy bandwidth and matmul rate measured at the
start: the larger of (unavoidable bytes / copy rate) and (products / matmul rate), over the time. Unavoidable bytes are
the operation's tensors read once and written once; a contender that moves more shows it in a lower percentage. The
peak is what torch's allocator holds in one call forward and backward beyond the operands.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import GIB, Table, parser
from ftkernels.delta_net import NetSizes, NetWeights, delta_net, delta_net_reference
from ftkernels.delta_rule import delta_rule
from ftkernels.glu import glu
from ftkernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from ftkernels.linear_divergence import LinearHead, linear_divergence
from ftkernels.linear_log_prob import linear_log_prob, linear_log_prob_reference
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_mlp import lora_mlp
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import Norm, Projection, join_weights
from ftkernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from ftkernels.rope import apply_rope, apply_rope_reference
from timing import SHAPES, Clock, Maker, Roofline, Shape, peak_bytes, shape_of, start
from torch import Tensor


@dataclass
class Case:
    """One operation: leaves that get gradients, contenders ``f(*leaves)``, and its work forward and backward.

    Contenders that go back themselves have no work left for ``backward``.
    """

    name: str
    leaves: list[Tensor]
    contenders: dict[str, Callable[..., Any]]
    forward_bytes: float
    backward_bytes: float
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    compile_these: tuple[str, ...] = field(default=("torch",))


def _liger() -> Any | None:
    return importlib.import_module("liger_kernel.ops") if importlib.util.find_spec("liger_kernel") else None


def norm_case(make: Maker, shape: Shape) -> Case:
    """RMSNorm with a frozen weight, as in LoRA training."""
    x, w = make.new(shape.tokens, shape.hidden, grad=True), make.new(shape.hidden)
    contenders = {
        "ftkernels": lambda x: rms_norm(x, w, 1e-6, form=shape.form),
        "torch": lambda x: rms_norm_reference(x, w, 1e-6, form=shape.form),
    }
    liger = _liger()
    if liger is not None:
        offset = 1.0 if shape.form == "gemma" else 0.0
        contenders["liger"] = lambda x: liger.LigerRMSNormFunction.apply(x, w, 1e-6, offset, shape.form, False)
    size = x.numel() * x.element_size()
    return Case("rms_norm", [x], contenders, 2 * size, 3 * size)


def add_norm_case(make: Maker, shape: Shape) -> Case:
    """Residual sum and RMSNorm."""
    x, r = (make.new(shape.tokens, shape.hidden, grad=True) for _ in range(2))
    w = make.new(shape.hidden)

    def plain(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return rms_norm_reference(total, w, 1e-6, form=shape.form), total

    contenders = {"ftkernels": lambda x, r: add_rms_norm(x, r, w, 1e-6, form=shape.form), "torch": plain}
    size = x.numel() * x.element_size()
    return Case("add_rms_norm", [x, r], contenders, 4 * size, 4 * size)


def rope_case(make: Maker, shape: Shape) -> Case:
    """Rotary embedding of q and k as strided views of their projections."""
    q = make.new(shape.batch, shape.seq_len, shape.q_heads * shape.head_dim, grad=True)
    k = make.new(shape.batch, shape.seq_len, shape.k_heads * shape.head_dim, grad=True)
    cos, sin = (make.new(1, shape.seq_len, shape.head_dim) for _ in range(2))

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)

    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k, c, s = heads(q), heads(k), cos[:, None], sin[:, None]
        return q * c + rotate_half(q) * s, k * c + rotate_half(k) * s

    contenders: dict[str, Callable[..., Any]] = {
        "ftkernels": lambda q, k: apply_rope(heads(q), heads(k), cos, sin),
        "torch": plain,
    }
    liger = _liger()
    if liger is not None:
        # In place on its inputs, so it turns copies.
        contenders["liger, with a copy"] = lambda q, k: liger.LigerRopeFunction.apply(
            heads(q).clone(), heads(k).clone(), cos, sin
        )
    size = (q.numel() + k.numel()) * q.element_size()
    return Case("rope", [q, k], contenders, 2 * size, 2 * size)


def glu_case(make: Maker, shape: Shape) -> Case:
    """The gated unit alone."""
    gate, up = (make.new(shape.tokens, shape.inner, grad=True) for _ in range(2))

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    contenders: dict[str, Callable[..., Any]] = {
        "ftkernels": lambda gate, up: glu(gate, up, shape.activation),
        "torch": plain,
    }
    liger = _liger()
    if liger is not None:
        name = "LigerSiLUMulFunction" if shape.activation == "silu" else "LigerGELUMulFunction"
        contenders["liger"] = getattr(liger, name).apply
    size = gate.numel() * gate.element_size()
    return Case(f"glu {shape.activation}", [gate, up], contenders, 3 * size, 5 * size)


def cross_entropy_case(make: Maker, shape: Shape) -> Case:
    """The frozen head with cross-entropy; its products are two, both in the forward of the chunked form."""
    x = make.new(shape.tokens, shape.hidden, grad=True)
    w = make.new(shape.vocabulary, shape.hidden, scale=shape.hidden**-0.5)
    labels = torch.randint(0, shape.vocabulary, (shape.tokens,), device=make.device)
    contenders: dict[str, Callable[..., Any]] = {
        "ftkernels": lambda x: linear_cross_entropy(x, w, labels, softcap=shape.softcap),
        "torch": lambda x: linear_cross_entropy_reference(x, w, labels, softcap=shape.softcap),
    }
    liger = _liger()
    if liger is not None:
        cap = shape.softcap or None
        contenders["liger"] = lambda x: liger.LigerFusedLinearCrossEntropyFunction.apply(
            x, w, labels, None, None, -100, 0.0, 0.0, "mean", cap
        )[0]
    flops = 2 * shape.tokens * shape.vocabulary * shape.hidden
    size = x.numel() * x.element_size()
    weight = w.numel() * w.element_size()
    return Case("linear_cross_entropy", [x], contenders, size + weight, 2 * size, 2 * flops, 0.0)


def _project(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """PEFT's computation under autocast, scaling 2."""
    dtype = w.dtype
    return F.linear(x, w) + F.linear(F.linear(x, a.to(dtype)), b.to(dtype)) * 2.0


def lora_linear_case(make: Maker, shape: Shape, rank: int) -> Case:
    """The output projection with its residual."""
    width = shape.q_heads * shape.head_dim
    x, r = make.new(shape.tokens, width, grad=True), make.new(shape.tokens, shape.hidden, grad=True)
    w = make.new(shape.hidden, width, scale=width**-0.5)
    a, b = make.adapter(shape.hidden, width, rank)

    def ours(x: Tensor, r: Tensor, a: Tensor, b: Tensor) -> Any:
        return lora_linear(x, Projection(w, None, a, b, 2.0), residual=r)

    contenders = {"ftkernels": ours, "torch": lambda x, r, a, b: r + _project(x, w, a, b)}
    flops = 2 * shape.tokens * (width * shape.hidden + rank * (width + shape.hidden))
    size = x.element_size()
    moved = size * (shape.tokens * (width + 2 * shape.hidden) + w.numel())
    return Case(
        "lora_linear o", [x, r, a, b], contenders, moved, moved, flops, 2 * flops - 2 * shape.tokens * w.numel()
    )


def lora_qkv_case(make: Maker, shape: Shape, rank: int) -> Case:
    """Norm, q, k, v and the rotary embedding."""
    z = make.new(shape.batch, shape.seq_len, shape.hidden, grad=True)
    norm = Norm(make.new(shape.hidden), 1e-6, shape.form)
    outs = [n * shape.head_dim for n in (shape.q_heads, shape.k_heads, shape.k_heads)]
    weights = [make.new(o, shape.hidden, scale=shape.hidden**-0.5) for o in outs]
    join_weights(weights)
    adapters = [t for o in outs for t in make.adapter(o, shape.hidden, rank)]
    rope = (make.new(1, shape.seq_len, shape.head_dim), make.new(1, shape.seq_len, shape.head_dim))

    def ours(z: Tensor, *ab: Tensor) -> Any:
        built = [Projection(w, None, ab[2 * i], ab[2 * i + 1], 2.0) for i, w in enumerate(weights)]
        return tuple(lora_qkv(z, *built, head_dim=shape.head_dim, norm=norm, rope=rope))[:3]

    def plain(z: Tensor, *ab: Tensor) -> Any:
        x = rms_norm_reference(z, norm.weight, norm.eps, form=norm.form)
        parts = [_project(x, w, ab[2 * i], ab[2 * i + 1]) for i, w in enumerate(weights)]
        q, k, v = (p.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for p in parts)
        return *apply_rope_reference(q, k, *rope), v

    rows, width = shape.tokens, sum(outs)
    base = 2 * rows * width * shape.hidden
    low = 2 * rows * rank * (3 * shape.hidden + width)
    moved = z.element_size() * (rows * (shape.hidden + width) + width * shape.hidden)
    return Case(
        "lora_qkv", [z, *adapters], {"ftkernels": ours, "torch": plain}, moved, moved, base + low, base + 2 * low
    )


def lora_mlp_case(make: Maker, shape: Shape, rank: int) -> Case:
    """Norm, gate, up, gated unit, down and the residual."""
    z = make.new(shape.batch, shape.seq_len, shape.hidden, grad=True)
    norm = Norm(make.new(shape.hidden), 1e-6, shape.form)
    sizes = [(shape.inner, shape.hidden), (shape.inner, shape.hidden), (shape.hidden, shape.inner)]
    weights = [make.new(o, i, scale=i**-0.5) for o, i in sizes]
    join_weights(weights[:2])
    adapters = [t for o, i in sizes for t in make.adapter(o, i, rank)]

    def ours(z: Tensor, *ab: Tensor) -> Any:
        built = [Projection(w, None, ab[2 * i], ab[2 * i + 1], 2.0) for i, w in enumerate(weights)]
        return lora_mlp(z, *built, activation=shape.activation, norm=norm, residual="add")

    def plain(z: Tensor, *ab: Tensor) -> Any:
        x = rms_norm_reference(z, norm.weight, norm.eps, form=norm.form)
        g, u = (_project(x, weights[i], ab[2 * i], ab[2 * i + 1]) for i in range(2))
        act = F.silu(g) if shape.activation == "silu" else F.gelu(g, approximate="tanh")
        return z + _project(act * u, weights[2], ab[4], ab[5])

    rows = shape.tokens
    base = 2 * rows * 3 * shape.inner * shape.hidden
    low = 2 * rows * rank * 3 * (shape.inner + shape.hidden)
    moved = z.element_size() * (2 * rows * shape.hidden + 3 * shape.inner * shape.hidden)
    return Case(
        "lora_mlp", [z, *adapters], {"ftkernels": ours, "torch": plain}, moved, moved, base + low, base + 2 * low
    )


def log_prob_case(make: Maker, shape: Shape) -> Case:
    """GRPO's log-probabilities under the frozen head; logits have the spread of a trained model's, about 3 nats."""
    x = make.new(shape.tokens, shape.hidden, grad=True)
    w = make.new(shape.vocabulary, shape.hidden, scale=3.0 * shape.hidden**-0.5)
    labels = torch.randint(0, shape.vocabulary, (shape.tokens,), device=make.device)
    rows = torch.arange(shape.tokens, device=make.device)
    contenders: dict[str, Callable[..., Any]] = {
        "ftkernels": lambda x: linear_log_prob(x, w, labels, rows=rows)[0],
    }
    if shape.tokens <= 16384:  # all logits at once, in float32, do not fit for more
        contenders["torch"] = lambda x: linear_log_prob_reference(x, w, labels)[0]
    if importlib.util.find_spec("trl") is not None:
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

        width = min(_CHUNKED_LOGPROB_CHUNK_SIZE, shape.vocabulary)
        contenders["trl"] = lambda x: _ChunkedLogProbFunction.apply(
            x, w, None, labels, 1.0, width, None, 1.0, ("entropy",)
        )[0]
    flops = 2 * shape.tokens * shape.vocabulary * shape.hidden
    moved = x.numel() * x.element_size() + w.numel() * w.element_size()
    return Case("linear_log_prob", [x], contenders, moved, 2 * moved, flops, 2 * flops, compile_these=())


def divergence_case(make: Maker, shape: Shape) -> Case:
    """Distillation's divergences of two heads beside log-probabilities, forward and backward; heads are frozen."""
    x, y = (make.new(shape.tokens, shape.hidden) for _ in range(2))
    w, v = (make.new(shape.vocabulary, shape.hidden, scale=shape.hidden**-0.5) for _ in range(2))
    labels = torch.randint(0, shape.vocabulary, (shape.tokens,), device=make.device)
    rows, weights = torch.arange(shape.tokens, device=make.device), torch.full(labels.shape, 1.0, device=make.device)

    def divergence(x: Tensor, beta: float) -> Any:
        loss = linear_divergence(LinearHead(x, w), LinearHead(y, v), weights / len(weights), beta=beta).loss
        return torch.autograd.grad(loss, x)

    contenders: dict[str, Callable[..., Any]] = {
        "log-probabilities": lambda x: torch.autograd.grad(linear_log_prob(x, w, labels, rows=rows)[0].sum(), x),
        **{f"divergence, beta {beta}": partial(divergence, beta=beta) for beta in (1.0, 0.0, 0.5)},
    }
    moved, flops = 2 * (x.numel() + w.numel()) * x.element_size(), 2 * shape.tokens * shape.vocabulary * shape.hidden
    return Case("linear_divergence", [x.requires_grad_()], contenders, moved, 0.0, 3 * flops, compile_these=())


def _delta_sizes(shape: Shape) -> NetSizes:
    """Qwen3.5-9B's heads, whatever the model."""
    return NetSizes(16, 32, 128, 128) if shape.head_dim >= 64 else NetSizes(2, 4, 16, 16)


def _delta_heads(make: Maker, shape: Shape) -> list[Tensor]:
    sizes = _delta_sizes(shape)
    heads = (sizes.key_heads, sizes.key_size), (sizes.key_heads, sizes.key_size), (sizes.value_heads, sizes.value_size)
    made = [make.new(shape.batch, shape.seq_len, n, size, grad=True) for n, size in heads]
    gates = (shape.batch, shape.seq_len, sizes.value_heads)
    g = -torch.rand(gates, device=make.device)
    return [*made, g.requires_grad_(), torch.rand(gates, device=make.device).requires_grad_()]


def _delta_flops(shape: Shape) -> float:
    """As ``ftcli.facts.flops`` counts the rule's forward pass in chunks of 64."""
    sizes, c = _delta_sizes(shape), 64
    k, v = sizes.key_size, sizes.value_size
    each = 2.0 * (3 * c * k + 2 * c * v + 3 * k * v) + 2.0 * c * c / 3
    return shape.tokens * sizes.value_heads * each


def delta_rule_case(make: Maker, shape: Shape) -> Case:
    """The gated delta rule in chunks."""
    leaves = _delta_heads(make, shape)
    contenders: dict[str, Callable[..., Any]] = {
        "ftkernels": lambda *heads: delta_rule(*heads),
        "torch": lambda *heads: delta_rule(*heads, backend="torch"),
    }
    if importlib.util.find_spec("fla") is not None:
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

        def fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
            return rule(q, k, v, g=g, beta=beta.to(q.dtype), use_qk_l2norm_in_kernel=True)[0]

        contenders["fla"] = fla
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    out = leaves[2].numel() * leaves[2].element_size()
    flops = _delta_flops(shape)
    return Case("delta_rule", leaves, contenders, size + out, 2 * size + out, flops, 2.7 * flops, compile_these=())


def delta_net_case(make: Maker, shape: Shape) -> Case:
    """All between the projections of a gated delta net: filter, gates, rule, gated norm."""
    sizes = _delta_sizes(shape)
    joined = make.new(shape.batch, shape.seq_len, sum(sizes.parts), grad=True)
    channels, heads = sum(sizes.parts[:3]), sizes.value_heads
    filter, norm = make.new(channels, 4, scale=0.5), make.new(sizes.value_size)
    weights = NetWeights(filter, None, make.new(heads), make.new(heads), norm, 1e-6)
    contenders: dict[str, Callable[..., Any]] = {
        "ftkernels": lambda joined: delta_net(joined, weights, sizes),
        "torch": lambda joined: delta_net_reference(joined, weights, sizes),
    }
    size, flops = joined.numel() * joined.element_size(), _delta_flops(shape)
    out = shape.tokens * sizes.parts[2] * joined.element_size()
    return Case("delta_net", [joined], contenders, size + out, 2 * size + out, flops, 2.7 * flops, compile_these=())


def all_cases(make: Maker, shape: Shape, rank: int, only: str) -> Iterator[Case]:
    """Every operation whose name contains ``only``; each case's tensors are freed before the next is made."""
    plain = (norm_case, add_norm_case, rope_case, glu_case, cross_entropy_case, log_prob_case, divergence_case)
    delta = (delta_rule_case, delta_net_case)
    lora = (lora_linear_case, lora_qkv_case, lora_mlp_case)
    for build in (*plain, *delta, *lora):
        if only not in build.__name__.removesuffix("_case"):
            continue
        yield build(make, shape, rank) if build in lora else build(make, shape)


def time_case(case: Case, clock: Clock, roofline: Roofline, table: Table, model: str, *, with_compile: bool) -> None:
    """Adds a row for each contender and direction."""
    contenders = dict(case.contenders)
    if with_compile:
        contenders |= {f"{n}, compiled": torch.compile(contenders[n]) for n in case.compile_these}
    work = {
        "forward": (case.forward_bytes, case.forward_flops),
        "backward": (case.backward_bytes, case.backward_flops),
    }
    functions = {"forward": {name: _forward(f, case) for name, f in contenders.items()}}
    if case.backward_bytes:
        functions["backward"] = {name: _backward(f, case) for name, f in contenders.items()}
    once = _backward if case.backward_bytes else _forward
    peaks = {name: peak_bytes(lambda f=f: once(f, case)()) for name, f in contenders.items()}
    for direction, group in functions.items():
        moved, flops = work[direction]
        ideal = max(moved / roofline.copy_bytes, flops / roofline.matmul_flops) * 1e3
        for name, ms in clock.medians(group).items():
            peak = peaks[name]
            gib = None if peak is None else peak / GIB
            row = {"model": model, "op": case.name, "direction": direction, "contender": name, "ms": ms}
            table.add(**row, **{"% of roofline": 100 * ideal / ms, "peak GiB": gib, "bytes": moved, "flops": flops})


def _forward(function: Callable[..., Any], case: Case) -> Callable[[], object]:
    return lambda: function(*case.leaves)


def _backward(function: Callable[..., Any], case: Case) -> Callable[[], object]:
    out = function(*case.leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    incoming = [torch.ones_like(o) if o.dim() == 0 else torch.randn_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, case.leaves, incoming, retain_graph=True)


def main() -> None:
    """Prints the table; writes JSON where asked."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    arguments.add_argument("--only", default="", help="operations whose name contains this")
    arguments.add_argument("--batch", type=int, help="rows, in place of 2")
    arguments.add_argument("--seq", type=int, help="tokens of a row, in place of 4096")
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--compile", action="store_true", help="also time torch.compile of the plain torch form")
    options = arguments.parse_args()
    device = start(options)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = Clock(device, options.rounds)
    roofline = clock.roofline(dtype)
    print(f"copy {roofline.copy_bytes / 1e12:.3f} TB/s, matmul {roofline.matmul_flops / 1e12:.1f} TFLOP/s")
    columns = {"model": "", "op": "", "direction": "", "contender": "", "ms": ".3f"}
    table = Table({**columns, "% of roofline": ".1f", "peak GiB": ".2f"})
    for model in options.models:
        for case in all_cases(
            Maker(device, dtype), _sized(shape_of(options, model), options), options.rank, options.only
        ):
            time_case(case, clock, roofline, table, model, with_compile=options.compile)
    table.save(options.json)


def _sized(shape: Shape, options: argparse.Namespace) -> Shape:
    if options.device == "cpu":
        return shape
    return replace(shape, batch=options.batch or shape.batch, seq_len=options.seq or shape.seq_len)


if __name__ == "__main__":
    main()
