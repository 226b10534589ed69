"""The decoder layers as one function: the same bits as layer by layer, in every family that the kernels take."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn

from ftcli.model import cuda_graphs
from ftcli.model.backbone import base_of, decoder_layers, hidden_states
from ftcli.model.fused import DecoderStack, StackCall, stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from ftcli.tables import families
from tests.small_models import _COMMON, TEXT, adapted_everywhere, by_kind
from tests.tiers import in_turn

FAMILIES = [name for name, row in families.TABLE.items() if row.kernels == "layers" and name in TEXT]


def adapted(
    name: str, dropout: float = 0.0, kernels: Any = "reference", targets: Any = "all-linear", **more: Any
) -> Any:
    values = {**_COMMON, **TEXT[name]}
    config = transformers.AutoConfig.for_model(name, **{k: v for k, v in values.items() if v is not None})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = adapted_everywhere(model, targets=targets, lora_dropout=dropout, **more)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.normal_(parameter, std=0.1)
    patch(model, kernels)
    return model.train()


def batches() -> dict[str, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(1))
    plain = {"input_ids": ids, "labels": ids.clone()}
    positions = torch.cat([torch.arange(13), torch.arange(27)])[None].expand(2, -1)
    return {"whole rows": plain, "documents": plain | {"position_ids": positions}}


def run(model: Any, batch: dict[str, torch.Tensor], stack: DecoderStack | None) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    loss = forward_loss(model, dict(batch), stack=stack).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("name", "kind"), in_turn(by_kind(FAMILIES), ["whole rows", "documents"]))
def test_a_stack_gives_the_bits_of_single_layers(name: str, kind: str) -> None:
    model, batch = adapted(name), batches()[kind]
    wanted = run(model, batch, None)
    found = run(model, batch, taken(model))
    assert len(found) > 10
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_adapters_are_packed_as_they_are_now() -> None:
    """A step changes them, and evaluation runs without the stack: neither may see what was packed before."""
    model, batch = adapted("qwen3"), batches()["documents"]
    stack = taken(model)
    run(model, batch, stack)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)
    changed = run(model, batch, None)
    assert all(torch.equal(a, b) for a, b in zip(run(model, batch, stack), changed, strict=True))
    with model.disable_adapter():
        plain = run_forward(model, batch, None)
        assert torch.equal(run_forward(model, batch, stack), plain)
    assert not torch.equal(changed[0], plain)


def run_forward(model: Any, batch: dict[str, torch.Tensor], stack: DecoderStack | None) -> torch.Tensor:
    with torch.no_grad():
        return forward_loss(model, dict(batch), stack=stack).loss


@pytest.mark.parametrize("policy", ["selective", True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_policies_and_dropout_are_as_before(policy: Any, dropout: float) -> None:
    model, batch = adapted("llama", dropout), batches()["documents"]
    wanted = run(model, batch, None)
    if policy is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    else:
        use_checkpointing(model, policy)
    found = run(model, batch, taken(model))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("targets", "more"),
    [
        (["q_proj", "v_proj"], {}),
        (["down_proj"], {"layers_to_transform": [1]}),
        (["q_proj", "k_proj", "gate_proj", "up_proj"], {"rank_pattern": {"k_proj": 2, "up_proj": 20}}),
    ],
)
def test_some_modules_of_a_group_have_adapters_and_others_have_none(targets: list[str], more: dict[str, Any]) -> None:
    model, batch = adapted("llama", targets=targets, **more), batches()["documents"]
    wanted = run(model, batch, None)
    found = run(model, batch, taken(model))
    assert len(found) > 1
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_last_layer_runs_them_all_at_once() -> None:
    model = adapted("llama")
    stack = taken(model)
    calls: list[StackCall] = []

    def runner(call: StackCall) -> torch.Tensor:
        calls.append(call)
        return stack.run(call)

    stack.runner = runner
    hidden_states(model, {"input_ids": batches()["whole rows"]["input_ids"]}, stack)
    (call,) = calls
    assert len(call.layer_calls) == len(list(decoder_layers(base_of(model))))
    assert len({id(layer_call.mask) for layer_call in call.layer_calls}) == 1
    assert not stack.collects


def test_a_call_that_fails_leaves_the_layers_as_they_were() -> None:
    model = adapted("llama")
    stack = taken(model)

    def runner(call: StackCall) -> torch.Tensor:
        raise ValueError("no")

    stack.runner = runner
    batch = batches()["whole rows"]
    with pytest.raises(ValueError, match="no"):
        forward_loss(model, dict(batch), stack=stack)
    assert not stack.collects
    stack.runner = None
    assert all(torch.equal(a, b) for a, b in zip(run(model, batch, stack), run(model, batch, None), strict=True))


def test_a_model_with_a_layer_off_the_kernels_has_no_stack() -> None:
    assert stack_of(adapted("llama", kernels="off")) == "layers.0 is not on the kernels"


def captured(call: StackCall) -> Any:
    """What a graph of ``call`` (1, 8, 4) reads, without the graph."""
    nowhere = torch.zeros(1, 8, 4)
    return cuda_graphs._Captured(
        forward=cast("torch.cuda.CUDAGraph", None), backward=cast("torch.cuda.CUDAGraph", None),
        hidden=nowhere, beside=None, out=nowhere, d_out=nowhere, d_hidden=None, d_beside=None,
        layer_calls=cuda_graphs._fixed(call.layer_calls),
    )  # fmt: skip


def taken(model: Any) -> DecoderStack:
    stack = stack_of(model, torch.float32)
    assert isinstance(stack, DecoderStack)
    assert stack_of(model) is stack
    return stack
