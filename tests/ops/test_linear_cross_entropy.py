"""Linear head with cross-entropy in chunks."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ftkernels import limits
from ftkernels.cross_entropy import LossOptions, cross_entropy_rows, cross_entropy_rows_reference
from ftkernels.linear_cross_entropy import TrainedRows, linear_cross_entropy, linear_cross_entropy_reference

ours = partial(linear_cross_entropy, backend="triton")


def _case(device: str, rows: int = 13, hidden: int = 33, vocabulary: int = 301) -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias, labels; a third of the labels is ignored."""
    x = torch.randn(rows, hidden, device=device)
    w = torch.randn(vocabulary, hidden, device=device) * 0.6
    b = torch.randn(vocabulary, device=device)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    labels[::3] = -100
    return x, w, b, labels


def _call(function: Any, labels: torch.Tensor, **options: Any) -> Any:
    return lambda x, w, b: function(x, w, labels, bias=b, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"reduction": "sum", "softcap": 30.0, "logit_scale": 0.5},
        {"reduction": "none", "label_smoothing": 0.1},
        {"reduction": "none", "softcap": 5.0, "label_smoothing": 0.2, "logit_scale": 2.0},
        {"reduction": "mean", "num_items": 77, "label_smoothing": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_loss_and_all_gradients_match_float64(device: str, tools: Any, options: dict[str, Any], backend: Any) -> None:
    *inputs, labels = _case(device)
    tools.assert_float32(
        _call(linear_cross_entropy, labels, chunk_rows=4, backend=backend, **options),
        _call(linear_cross_entropy_reference, labels, **options),
        inputs,
    )


@pytest.mark.parametrize(
    "options",
    [{"reduction": "mean", "num_items": 7}, {"reduction": "sum", "softcap": 5.0, "logit_scale": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_rows_of_a_frozen_head_get_their_gradients(
    device: str, tools: Any, options: dict[str, Any], backend: Any
) -> None:
    x, w, b, labels = _case(device)
    ids = torch.tensor([300, 3, 44], device=device)
    labels[1], labels[4] = 3, 300

    def rows_alone(x: torch.Tensor, rows: torch.Tensor) -> Any:
        head = w.to(x.dtype).index_copy(0, ids, rows.detach())
        trained = TrainedRows(rows, ids)
        call = partial(linear_cross_entropy, backend=backend, chunk_rows=4, head_rows=trained)
        return call(x, head, labels, bias=b.to(x.dtype), **options)

    def reference(x: torch.Tensor, rows: torch.Tensor) -> Any:
        head = w.to(x.dtype).index_copy(0, ids, rows)
        return linear_cross_entropy_reference(x, head, labels, bias=b.to(x.dtype), **options)

    tools.assert_float32(rows_alone, reference, (x, torch.randn(3, 33, device=device)))


def test_rows_of_a_head_have_no_gradient_of_a_loss_for_each_row(device: str) -> None:
    x, w, _, labels = _case(device)
    with pytest.raises(ValueError, match="no gradient of a loss for each row"):
        ours(x, w, labels, reduction="none", head_rows=TrainedRows(w[:2], torch.tensor([0, 1], device=device)))


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (3, 127), (129, 129), (2, 9001)])
def test_odd_shapes(device: str, tools: Any, rows: int, vocabulary: int) -> None:
    x, w, b, _ = _case(device, rows, 5, vocabulary)
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    tools.assert_float32(_call(ours, labels), _call(linear_cross_entropy_reference, labels), (x, w, b))


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])  # fmt: skip  # noqa: E501
def test_bfloat16_is_as_good_as_torch(device: str, tools: Any, dtypes: tuple[Any, Any], backend: Any) -> None:
    x, w, _, labels = _case(device, 24, 64, 300)
    tools.assert_bfloat16(
        lambda x, w: linear_cross_entropy(x, w, labels, backend=backend),
        lambda x, w: linear_cross_entropy_reference(x, w, labels),
        (x, w),
        dtypes,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_what_explicit_casts_give(device: str, dtype: Any) -> None:
    x, w, _, labels = _case(device, 8, 32, 100)
    leaves = [x.to(dtype).requires_grad_(), w.clone().requires_grad_()]
    with torch.autocast(device, torch.bfloat16):
        loss = ours(leaves[0], leaves[1], labels)
        grads = torch.autograd.grad(loss, leaves)  # backward inside autocast changes nothing either
    low = [x.to(torch.bfloat16).requires_grad_(), w.to(torch.bfloat16).requires_grad_()]
    expected = ours(low[0], low[1], labels)
    assert torch.equal(loss, expected)
    assert [g.dtype for g in grads] == [dtype, torch.float32]
    for got, want in zip(grads, torch.autograd.grad(expected, low), strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 5e-3


@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_accuracy_counts_like_argmax(device: str, chunk_rows: int | None) -> None:
    x, w, b, labels = _case(device)
    labels = torch.where(labels >= 0, (x @ w.t() + b).argmax(-1), labels)
    labels[1] = (labels[1] + 1) % 301
    w[7], b[7] = w[9], b[9]  # equal logits: the lower index wins
    for backend in ("triton", "torch"):
        _, correct = linear_cross_entropy(
            x, w, labels, bias=b, with_accuracy=True, backend=backend, chunk_rows=chunk_rows
        )
        _, expected = linear_cross_entropy_reference(x, w, labels, bias=b, with_accuracy=True)
        assert correct.dtype == torch.int64
        assert int(correct) == int(expected)
        assert 0 < int(correct) < int((labels >= 0).sum())


def test_ties_go_to_the_lowest_index(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]], device=device)
    labels = torch.tensor([1, 2], device=device)
    for rows in (cross_entropy_rows, cross_entropy_rows_reference):
        assert rows(logits.clone(), labels, LossOptions(), want_grad=False).correct.tolist() == [1, 0]


@pytest.mark.parametrize("softcap", [0.0, 30.0, 60.0])
def test_ties_in_the_label_s_own_lane_and_in_others(device: str, softcap: float) -> None:
    """A lane is eight columns: equal logits before and behind the label, in its lane, its block and others; none."""
    vocabulary, label = 9001, 4100
    equal = [4096, 4099, 4101, 4103, 4095, 4104, 0, 8999, 9000, label]
    logits = torch.randn(len(equal), vocabulary, device=device)
    logits[:, label] = 9.0
    for row, column in enumerate(equal):
        logits[row, column] = 9.0
    labels = torch.full((len(equal),), label, device=device)
    options = LossOptions(softcap=softcap)
    for rows in (cross_entropy_rows, cross_entropy_rows_reference):
        found = rows(logits.clone(), labels, options, want_grad=True)
        assert found.correct.tolist() == [int(column >= label) for column in equal]
        logits[:, 17] = 9.5  # ahead of all labels
        assert not rows(logits.clone(), labels, options, want_grad=False).correct.any()
        logits[:, 17] = 0.0


def test_evaluation_computes_no_gradient(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("ftkernels.linear_cross_entropy")
    wanted: list[bool] = []

    def recording(*args: Any, want_grad: bool, **kwargs: Any) -> Any:
        wanted.append(want_grad)
        return cross_entropy_rows(*args, want_grad=want_grad, **kwargs)

    monkeypatch.setattr(module, "cross_entropy_rows", recording)
    x, w, b, labels = _case(device)
    x.requires_grad_()
    training = ours(x, w, labels, bias=b)
    with torch.no_grad():
        evaluating = ours(x, w, labels, bias=b)
    assert wanted == [True, False]
    assert not evaluating.requires_grad
    assert torch.equal(training.detach(), evaluating)


def test_frozen_head_gets_no_gradient_and_the_head_alone_can_train(device: str) -> None:
    x, w, _, labels = _case(device)
    x.requires_grad_()
    ours(x, w, labels).backward()
    assert x.grad is not None
    assert w.grad is None
    head = w.clone().requires_grad_()
    ours(x.detach(), head, labels).backward()
    expected = w.clone().requires_grad_()
    linear_cross_entropy_reference(x.detach(), expected, labels).backward()
    assert head.grad is not None
    assert torch.allclose(head.grad, expected.grad, atol=1e-6)


def test_tied_head_sums_both_gradients(device: str) -> None:
    ids = torch.randint(0, 50, (9,), device=device)
    labels = torch.randint(0, 50, (9,), device=device)
    grads = []
    for function in (ours, linear_cross_entropy_reference):
        embedding = torch.nn.Embedding(50, 16, device=device)
        with torch.no_grad():
            embedding.weight.copy_(torch.arange(800, device=device).view(50, 16).sin())
        function(embedding(ids) * 4, embedding.weight, labels).backward()
        grads.append(embedding.weight.grad)
    assert torch.allclose(grads[0], grads[1], atol=1e-6)


def test_second_backward_through_a_retained_graph(device: str) -> None:
    x, w, b, labels = _case(device)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    loss = ours(x, w, labels, bias=b)
    first = torch.autograd.grad(loss, leaves, torch.tensor(2.0, device=device), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(1.0, device=device))
    for a, c in zip(first, second, strict=True):
        assert torch.allclose(a, 2 * c, rtol=1e-5, atol=1e-7)


def test_no_rows_and_no_labels_give_zero(device: str) -> None:
    w = torch.randn(20, 8, device=device, requires_grad=True)
    for rows in (0, 3):
        x = torch.randn(rows, 8, device=device, requires_grad=True)
        loss = ours(x, w, torch.full((rows,), -100, device=device))
        grads = torch.autograd.grad(loss, (x, w))
        assert loss.item() == 0.0
        assert all(float(g.abs().sum()) == 0.0 for g in grads)


def test_strided_hidden_states(device: str, tools: Any) -> None:
    x, w, _, labels = _case(device, 12, 32)
    tools.assert_float32(
        lambda x, w: ours(x.view(12, 2, 16)[:, 1], w[:, ::2], labels),
        lambda x, w: linear_cross_entropy_reference(x.view(12, 2, 16)[:, 1], w[:, ::2], labels),
        (x, w),
    )


def test_twice_the_same_bits(device: str) -> None:
    x, w, b, labels = _case(device)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    runs = [torch.autograd.grad(ours(x, w, labels, bias=b, chunk_rows=3), leaves) for _ in range(2)]
    assert all(torch.equal(a, c) for a, c in zip(*runs, strict=True))


def test_logits_never_exist_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("ftkernels.linear_cross_entropy")
    seen: list[int] = []
    addresses: set[int] = set()

    def recording(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(logits.shape[0])
        addresses.add(logits.data_ptr())
        return cross_entropy_rows(logits, *args, **kwargs)

    monkeypatch.setattr(module, "cross_entropy_rows", recording)
    monkeypatch.setattr(limits, "LOSS_WORKSPACE_BYTES", 256 * 301 * 4)
    x, w, b, labels = _case(device, 600)
    ours(x.requires_grad_(), w, labels, bias=b)
    assert seen == [256, 144]  # 400 labelled rows, in multiples of 256 that fit
    assert len(addresses) == 1  # one buffer, chunk after chunk


def test_the_incoming_gradient_is_not_rounded_to_bfloat16(device: str) -> None:
    """A 0-d factor is rounded to the other operand's dtype on a GPU: every gradient would be off by the same 0.2%."""
    x, w, _, labels = _case(device, 24, 64, 300)
    x, w = x.bfloat16().requires_grad_(), w.bfloat16()
    grads = [
        torch.autograd.grad(ours(x, w, labels, reduction="sum"), x, torch.tensor(factor, device=device))[0].double()
        for factor in (1.0, 1.3)  # 1.296875 in bfloat16
    ]
    assert abs(float((grads[1] * grads[0]).sum() / grads[0].square().sum()) / 1.3 - 1.0) < 5e-4


def test_gradcheck(device: str) -> None:
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, device=device, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, -100, 4], device=device)
    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(
            lambda x, w, r=reduction: ours(x, w, labels, softcap=3.0, label_smoothing=0.1, reduction=r), (x, w)
        )


# The peers' bugs, each by its number.


def test_liger_1456_lanes_past_the_vocabulary_do_not_count_after_the_cap(device: str) -> None:
    """-inf padding through a softcap of 30 becomes -30 and adds exp(-30) a lane: visible when logits are near -28."""
    logits = torch.full((2, 129), -28.0, device=device)
    labels = torch.tensor([0, 128], device=device)
    result = cross_entropy_rows(logits.clone(), labels, LossOptions(softcap=30.0), want_grad=False)
    assert torch.allclose(result.losses, torch.full((2,), 129.0, device=device).log(), atol=1e-5)


def test_liger_968_reduction_none_scales_each_row(device: str, tools: Any) -> None:
    """The incoming gradient has a factor a row, and the head's gradient must use it inside the product."""
    x, w, _, labels = _case(device)
    factor = torch.linspace(-2, 3, x.shape[0], device=device)
    tools.assert_float32(
        lambda x, w: (ours(x, w, labels, reduction="none") * factor.to(x.dtype)).sum(),
        lambda x, w: (linear_cross_entropy_reference(x, w, labels, reduction="none") * factor.to(x.dtype)).sum(),
        (x, w),
    )


def test_liger_1329_gradient_of_a_confident_true_class_survives_bfloat16(device: str) -> None:
    """p = 0.9990 rounds to 1 in bfloat16, so p - 1 must be taken before rounding."""
    logits = torch.tensor([[9.0, 2.0, 0.0, 0.0]], device=device, dtype=torch.bfloat16)
    labels = torch.tensor([0], device=device)
    exact = F.softmax(logits.double(), -1)
    assert float(exact[0, 0].to(torch.bfloat16)) == 1.0
    grad = cross_entropy_rows(logits.clone(), labels, LossOptions(), want_grad=True).d_logits
    assert grad is not None
    assert abs(float(grad[0, 0]) / (float(exact[0, 0]) - 1.0) - 1.0) < 1e-2


def test_liger_272_1251_nothing_of_the_callers_is_overwritten(device: str) -> None:
    """The gradient overwrites this operation's own logits only; autograd would not notice if it were the caller's
    memory.
    """
    x, w, b, labels = _case(device)
    tensors = (x, w, b, labels)
    kept = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    loss = linear_cross_entropy(x.requires_grad_(), w, labels, bias=b, backend="triton")
    loss.backward()
    assert versions == [t._version for t in tensors]
    assert all(torch.equal(a.detach(), c) for a, c in zip(tensors, kept, strict=True))


def test_transformers_34191_accumulation_is_true_to_the_whole_batch(device: str) -> None:
    """Micro-batches of unequal label counts, divided by the step's total, sum to the whole batch's mean."""
    x, w, _, labels = _case(device, 20)
    labels[:7] = -100
    total = int((labels != -100).sum())
    whole = ours(x, w, labels)
    parts = [
        ours(x[p], w, labels[p], num_items=torch.tensor(total, device=device)) for p in (slice(0, 9), slice(9, 20))
    ]
    assert torch.allclose(whole, parts[0] + parts[1], rtol=1e-6)


def test_vllm_56578_huge_logits_under_a_cap_are_finite(device: str) -> None:
    logits = torch.tensor([[1e9, -1e9, 0.0], [-1e9, 1e9, 1e9]], device=device)
    labels = torch.tensor([1, 0], device=device)
    result = cross_entropy_rows(logits.clone(), labels, LossOptions(softcap=30.0), want_grad=True)
    assert torch.isfinite(result.losses).all()
    assert result.d_logits is not None
    assert torch.isfinite(result.d_logits).all()
    assert abs(float(result.losses[0]) - 60.0) < 1e-3


def test_fa_2611_bnb_1784_row_offsets_past_two_to_the_31(device: str) -> None:
    """Row 2 starts past 2**31 elements; the memory between the rows is never touched."""
    stride = 2**30 + 64
    storage = torch.UntypedStorage(4 * (2 * stride + 9), device=device)
    logits = torch.tensor([], device=device).set_(storage, 0, (3, 9), (stride, 1))
    logits.copy_(torch.randn(3, 9))
    labels = torch.tensor([0, 4, 8], device=device)
    result = cross_entropy_rows(logits, labels, LossOptions(), want_grad=False)
    assert torch.allclose(result.losses, F.cross_entropy(logits.contiguous(), labels, reduction="none"), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 301])}, "label 301"),
        ({"labels": torch.tensor([0, -1])}, "label -1"),
        ({"hidden": torch.ones(2, 301)}, "logits"),
        ({"hidden": torch.ones(3, 33)}, "2 labels for 3 rows"),
        ({"bias": torch.ones(5)}, "bias"),
        ({"softcap": -1.0}, "softcap"),
        ({"reduction": "sum", "num_items": 3}, "num_items"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.ones(2, 33),
        "weight": torch.ones(301, 33),
        "labels": torch.tensor([0, 1]),
    }
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("softcap", [0.0, 30.0, 60.0])
def test_nan_stays_nan(device: str, softcap: float) -> None:
    """Under a cap too: a clamp that drops NaN would make a plausible loss of a broken model."""
    hidden, head = torch.randn(4, 16, device=device), torch.randn(40, 16, device=device)
    hidden[1, 3] = float("nan")
    labels = torch.arange(4, device=device)
    leaf = hidden.requires_grad_()
    losses = linear_cross_entropy(leaf, head, labels, softcap=softcap, reduction="none", backend="triton")
    assert losses.isnan().tolist() == [False, True, False, False]
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert gradient[1].isnan().all()
    assert gradient[[0, 2, 3]].isfinite().all()
