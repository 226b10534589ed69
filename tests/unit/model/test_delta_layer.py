"""Layers whose mixer is a gated delta net: transformers' numbers, and documents kept apart wherever they begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from ftkernels.delta_net import delta_net
from ftkernels.device import interpreting
from torch import Tensor

from ftcli.config.model import QuantizationConfig
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import FtcliError
from ftcli.model import cuda_graphs
from ftcli.model.backbone import base_of, decoder_layers, hidden_states
from ftcli.model.fused import LayerCall, StackCall, stack_of
from ftcli.model.layers import FusedDeltaLayer
from ftcli.model.masks import Documents, plain_mask
from ftcli.model.patch import patch
from ftcli.model.quantized import layers_to_quantize, quantize_linear
from ftcli.model.sequence_parallel import SequencePart
from ftcli.plan.precision import DtypePlan
from ftcli.train.assembly import check_isolation
from tests.small_models import build
from tests.unit.model.test_stack import captured

LENGTH = 70
#: Heads that the kernels take, and the interpreter computes in seconds.
OF_KERNELS = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "num_hidden_layers": 2, "full_attention_interval": 2}  # fmt: skip  # noqa: E501


def model_of(*, lora: bool, kernels: bool = True, **change: Any) -> Any:
    """Whole, or with adapters on every linear layer that change what it computes."""
    model: Any = build("qwen3_5_text", **change)
    if lora:
        settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(1)
        model = peft.get_peft_model(model, settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.03)
    if kernels:
        assert all(entry.on for entry in patch(model, "reference").table)
    return model.train()


def ids(rows: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(5, 250, (rows, length), generator=torch.Generator().manual_seed(3))


def toward(shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def with_gradients(model: Any, tokens: Tensor, weights: Tensor, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    states = hidden_states(model, {"input_ids": tokens, **inputs}).tensor
    (states * weights).sum().backward()
    return states.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_same(
    found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]], tolerance: float = 1e-5
) -> None:
    assert relative(found[0], wanted[0]) <= tolerance
    assert found[1].keys() == wanted[1].keys()
    worst = max((relative(found[1][name], gradient), name) for name, gradient in wanted[1].items())
    assert worst[0] <= tolerance, worst


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("lora", [True, False])
def test_hidden_states_and_every_gradient_are_transformers(lora: bool) -> None:
    tokens, weights = ids(2), toward((2, LENGTH, 32))
    wanted = with_gradients(model_of(lora=lora, kernels=False), tokens, weights)
    found = with_gradients(model_of(lora=lora), tokens, weights)
    linears = ("q_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "o_proj", "down_proj")
    assert all(any(each in name for name in found[1]) for each in linears)
    require_same(found, wanted)


def packed(lengths: Sequence[int]) -> dict[str, Tensor]:
    begins = torch.tensor([0, *lengths]).cumsum(0)[:-1].repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"position_ids": positions[None], "document_starts": begins[None].int()}


def alone(model: Any, lengths: Sequence[int], tokens: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states side by side, and the sums of the gradients."""
    parts = zip(tokens.split(list(lengths), 1), weights.split(list(lengths), 1), strict=True)
    each = [with_gradients(model, *part) for part in parts]
    return torch.cat([states for states, _ in each], 1), {
        name: torch.stack([gradients[name] for _, gradients in each]).sum(0) for name in each[0][1]
    }


#: Around the filter's width and a chunk's end.
TELLING = (1, 2, 3, 4, 33, 62, 63, 64, 65)


@pytest.mark.parametrize(
    ("lora", "boundaries"),
    [(True, TELLING), *(pytest.param(lora, range(1, 66), marks=pytest.mark.long) for lora in (True, False))],
)
def test_packed_is_alone_wherever_a_document_begins_in_a_chunk(lora: bool, boundaries: Sequence[int]) -> None:
    """Hidden states and every gradient, at up to 65 positions: where only the state is told, three positions leak
    through the filter. In float64, in which nothing else differs.
    """
    model, tokens, weights = model_of(lora=lora).double(), ids(), toward((1, LENGTH, 32)).double()
    for boundary in boundaries:
        lengths = (boundary, LENGTH - boundary)
        found = with_gradients(model, tokens, weights, **packed(lengths))
        require_same(found, alone(model, lengths, tokens, weights), 1e-11)


@pytest.mark.parametrize("told", ["document_starts", "position_ids"])
def test_documents_are_known_by_either_that_a_batch_says(told: str) -> None:
    model, tokens, weights, lengths = model_of(lora=True), ids(), toward((1, LENGTH, 32)), (30, 1, 2, 37)
    given = packed(lengths)
    given = given if told == "document_starts" else {"position_ids": given["position_ids"]}
    require_same(with_gradients(model, tokens, weights, **given), alone(model, lengths, tokens, weights))


def of_kernels(model: Any) -> Any:
    """The delta nets of the model on the interpreted kernels."""
    if not interpreting():
        pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")
    nets = [layer for layer in decoder_layers(base_of(model)) if isinstance(layer, FusedDeltaLayer)]
    assert nets
    for layer in nets:
        layer._backend = "triton"
    return model


@pytest.mark.parametrize("lora", [True, False])
def test_interpreted_kernels_compute_what_plain_torch_does(lora: bool) -> None:
    plain, tokens, weights = model_of(lora=lora, **OF_KERNELS), ids(), toward((1, LENGTH, 32))
    kernels = of_kernels(model_of(lora=lora, **OF_KERNELS))
    for lengths in ((LENGTH,), (30, 1, 2, 37)):
        given = packed(lengths)
        require_same(with_gradients(kernels, tokens, weights, **given), with_gradients(plain, tokens, weights, **given))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(side: str) -> None:
    """As evaluation and generation pad, against rows alone and against transformers' own layers."""
    model, own = model_of(lora=False).eval(), model_of(lora=False, kernels=False).eval()
    tokens, lengths = ids(3), (LENGTH, 41, 3)
    mask = torch.zeros(3, LENGTH, dtype=torch.int64)
    where = [slice(LENGTH - n, None) if side == "left" else slice(0, n) for n in lengths]
    for row, part in enumerate(where):
        mask[row, part] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        found = hidden_states(model, given).tensor
        wanted = hidden_states(own, given).tensor
        for row, part in enumerate(where):
            by_itself = hidden_states(model, {"input_ids": tokens[row : row + 1, part]}).tensor[0]
            assert relative(found[row, part], by_itself) <= 1e-5
            assert relative(found[row, part], wanted[row, part]) <= 1e-5


def test_a_changed_document_changes_no_bit_of_the_others() -> None:
    rows = [TokenizedRow(number, row, row) for number, row in enumerate(ids(3, 40).tolist())]
    plan = DtypePlan("float32", None, "float32", False, "a test")
    check_isolation(model_of(lora=False), rows, plan, torch.device("cpu"), pad_token_id=0)
    with pytest.raises(FtcliError, match="FT443"):
        check_isolation(model_of(lora=False, kernels=False), rows, plan, torch.device("cpu"), pad_token_id=0)


def on_fp8() -> Any:
    """In bfloat16, its linear layers in fp8."""
    model: Any = build("qwen3_5_text").to(torch.bfloat16)
    settings = QuantizationConfig(method="fp8")
    for name in layers_to_quantize(model):
        model.set_submodule(name, quantize_linear(model.get_submodule(name), settings, name))
    patch(model, "reference")
    return model


def rounded_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that does not begin its row is computed in other chunks: one in 20 of a net's numbers is off by a last
    place, the same ones each time.
    """

    def rounded(joined: Tensor, *parts: Any, starts: Tensor | None, **options: Any) -> Tensor:
        found = delta_net(joined, *parts, starts=starts, **options)
        if starts is None:
            return found
        chosen = torch.rand(found.shape, generator=torch.Generator().manual_seed(6)) < 0.05
        chosen &= (starts > 0)[..., None]
        return torch.where(chosen, found * (1.0 + torch.finfo(found.dtype).eps), found)

    monkeypatch.setattr("ftcli.model.layers.delta_net", rounded)


def faulty(change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes ``document_starts`` of rows of several documents."""

    def wrapped(model: Any, inputs: dict[str, Tensor]) -> Any:
        return hidden_states(model, {**inputs, "document_starts": change(inputs["document_starts"])})

    monkeypatch.setattr("ftcli.train.assembly.hidden_states", wrapped)


def parted(starts: Tensor) -> Tensor:
    """A document that does not begin its row forgets its first token: no neighbour is seen."""
    places = torch.arange(starts.shape[1])
    return torch.where((starts > 0) & (places > starts), starts + 1, starts).int()


@pytest.mark.parametrize(
    ("change", "refused"),
    [(None, False), (torch.zeros_like, True), (parted, True)],
    ids=["rounding", "a document that sees another", "a document that forgets its first token"],
)
def test_what_fp8_makes_of_a_last_place_is_told_from_a_leak(
    change: Callable[[Tensor], Tensor] | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [TokenizedRow(number, row, row) for number, row in enumerate(ids(3, 64).tolist())]
    plan, cpu = DtypePlan("bfloat16", None, "bfloat16", False, "a test"), torch.device("cpu")
    rounded_by_place(monkeypatch)
    if change is not None:
        faulty(change, monkeypatch)
    with pytest.raises(FtcliError, match="FT443") if refused else nullcontext():
        check_isolation(on_fp8(), rows, plan, cpu, pad_token_id=0)


def test_rows_that_branch_or_are_shared_are_refused() -> None:
    model, tokens = model_of(lora=False), ids()
    branches = torch.zeros(1, LENGTH, dtype=torch.int32)
    branches[:, 40:] = 40
    with pytest.raises(ValueError, match="documents that branch"):
        hidden_states(model, {"input_ids": tokens, "document_starts": branches * 0, "branch_starts": branches})
    shared = Documents(torch.zeros((1, 1), dtype=torch.int32), SequencePart(0, 2, lambda sent: sent))
    with pytest.raises(ValueError, match="over whole rows"):
        shared.within(plain_mask(tokens)).starts()


def test_the_device_is_not_asked_whether_there_is_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("transformers looked at the mask")

    model, given = model_of(lora=True), packed((30, 40))
    stack = stack_of(model, torch.float32)
    assert not isinstance(stack, str)
    module = type(base_of(model)).__module__
    for name in ("create_recurrent_attention_mask", "create_causal_mask"):
        monkeypatch.setattr(f"{module}.{name}", refuse)
    hidden_states(model, {"input_ids": ids(), **given}, stack)
    hidden_states(model, {"input_ids": ids()}, stack)


def test_a_captured_call_reads_where_documents_begin_from_its_own_memory() -> None:
    rotation = (torch.zeros(1, 8, 4), torch.zeros(1, 8, 4))

    def call_of(second: int) -> StackCall:
        starts = torch.tensor([[0] * second + [second] * (8 - second)], dtype=torch.int32)
        mask = Documents(starts).within(plain_mask(torch.zeros(1, 8, 4)))
        return StackCall(torch.zeros(1, 8, 4), (LayerCall(mask, rotation),))

    one, other = call_of(3), call_of(5)
    assert cuda_graphs._key(one) == cuda_graphs._key(other)
    fixed = captured(one)
    before = fixed.layer_calls[0].mask.starts()
    assert before is not None
    cuda_graphs._copy_in(fixed, other)
    after = fixed.layer_calls[0].mask.starts()
    assert after is not None
    assert after.data_ptr() == before.data_ptr()
    assert after.tolist() == [[0] * 5 + [5] * 3]
