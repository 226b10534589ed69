"""Stacks of experts in NF4 and fp8: tensors that are packed, in models that know them as parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from ftkernels.fp8 import quantize_rows
from ftkernels.nf4 import quantize_nf4
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ftcli.config.model import LoraConfig, QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.facts.shape import shape_of
from ftcli.model.experts import QuantizedStack, packed_stack, quantized_stack, quantized_stacks
from ftcli.model.lora import apply_lora
from ftcli.model.quantized import quantized_layers
from ftcli.model.renaming import Renaming
from ftcli.plain import plain_fields
from ftcli.plan.quantization import weight_bytes
from ftcli.tables import families
from tests.quantized import NF4, PLAN, SINGLE, load
from tests.small_models import TEXT, VOCABULARY, build, build_sparse
from tests.tiers import in_turn
from tests.unit.export.conftest import tokenizer

FP8 = QuantizationConfig(method="fp8")
NAME = "model.layers.1.mlp.experts.gate_up_proj"
SPARSE = [name for name, row in families.TABLE.items() if row.experts is not None and name in TEXT]


def stack_of(settings: QuantizationConfig = NF4, seed: int = 0) -> tuple[Any, Tensor]:
    """A stack and its numbers."""
    weight = torch.randn(4, 48, 40, generator=torch.Generator().manual_seed(seed))
    numbers = quantize_nf4(weight.view(-1, 40), double_quant=settings.double_quant).dequantize(torch.float32)
    return quantized_stack(weight, settings, torch.float32, NAME), numbers.view(weight.shape)


class Experts(nn.Module):
    def __init__(self, stack: nn.Parameter) -> None:
        super().__init__()
        self.gate_up_proj = stack


def bytes_of(stack: Any) -> list[Tensor]:
    nested = stack.packed.nested
    return [stack.packed.data, stack.packed.absmax, *(() if nested is None else (nested.absmax, nested.offset))]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bytes_of(one), bytes_of(other), strict=True))


@pytest.mark.parametrize("settings", [NF4, SINGLE], ids=["double", "single"])
def test_its_numbers_are_those_of_the_packed_matrix(settings: QuantizationConfig) -> None:
    stack, numbers = stack_of(settings)
    assert isinstance(stack, nn.Parameter)
    assert isinstance(stack, QuantizedStack)
    assert (tuple(stack.shape), stack.dtype, stack.requires_grad) == ((4, 48, 40), torch.float32, False)
    assert packed_stack(stack) is stack.packed
    assert packed_stack(numbers) is numbers
    assert f"{NAME}, (4, 48, 40) in nf4" in repr(stack)  # torch's own ended the process
    for found, wanted in (
        (stack + 0, numbers),
        (stack[2], numbers[2]),
        (stack.transpose(1, 2), numbers.transpose(1, 2)),
        (torch.stack([stack, stack]), torch.stack([numbers, numbers])),
        (nn.functional.linear(torch.ones(3, 40), stack[1]), nn.functional.linear(torch.ones(3, 40), numbers[1])),
        (numbers.clone().add_(stack), numbers + numbers),
    ):
        assert type(found) is Tensor
        assert torch.equal(found, wanted)


def test_what_moves_or_copies_it_keeps_it_packed() -> None:
    stack, numbers = stack_of()
    model = Experts(stack)
    copied = copy.deepcopy(model).gate_up_proj
    assert isinstance(copied, nn.Parameter)
    assert isinstance(copied, QuantizedStack)
    assert copied.packed.data.data_ptr() != stack.packed.data.data_ptr()
    assert same(copied, stack)
    assert (copied.stack_name, copied.requires_grad) == (NAME, False)
    cloned = stack.clone()
    assert isinstance(cloned, QuantizedStack)
    assert cloned.packed.data.data_ptr() != stack.packed.data.data_ptr()
    assert same(cloned, stack)
    for one in (stack.detach(), stack.data, model.state_dict()["gate_up_proj"], stack.to("cpu")):
        assert isinstance(one, QuantizedStack)
        assert one.packed.data.data_ptr() == stack.packed.data.data_ptr()
    for dtype in (torch.bfloat16, torch.float64):
        model.to(dtype)
        assert isinstance(model.gate_up_proj, QuantizedStack)
        assert model.gate_up_proj.dtype == dtype
        assert torch.equal(model.gate_up_proj + 0, stack.packed.dequantize(dtype).view(stack.shape))
        assert same(model.gate_up_proj, copied)  # never rounded: the same packed numbers in any dtype
    assert torch.equal(model.float().gate_up_proj + 0, numbers)


def test_a_module_that_moves_takes_the_packed_parts_along() -> None:
    """torch moves a module by ``parameter.data = moved``, which left the parts where they were."""
    stack, _ = stack_of()
    moved, numbers = stack_of(seed=1)
    stack.data = moved
    assert same(stack, moved)
    assert torch.equal(stack + 0, numbers)
    with pytest.raises(FtcliError, match=r"FT332.*experts\.gate_up_proj.*stored in nf4"):
        stack.data = numbers


def test_a_saved_state_is_loaded_and_other_writes_are_refused() -> None:
    """They went into the numbers of that one operation, and were lost."""
    (stack, numbers), (other, _) = stack_of(), stack_of(seed=1)
    model = Experts(other)
    model.load_state_dict(Experts(stack).state_dict())
    assert torch.equal(model.gate_up_proj + 0, numbers)
    assert other.packed.data.data_ptr() != stack.packed.data.data_ptr()
    for write in (
        lambda: stack.add_(1.0),
        lambda: stack.copy_(numbers),
        lambda: torch.add(numbers, 1.0, out=stack),
        lambda: nn.init.zeros_(stack),
    ):
        with pytest.raises(FtcliError, match="FT332"), torch.no_grad():
            write()
    assert torch.equal(stack + 0, numbers)


def model_of(model_type: str, folder: Path, settings: QuantizationConfig = NF4, **options: Any) -> Any:
    build_sparse(model_type).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return load(folder, settings, **options)


def random_b(model: Any) -> None:
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_adapters_of_peft_lie_on_it_as_on_dense_weights_of_the_same_numbers(model_type: str, tmp_path: Path) -> None:
    packed = model_of(model_type, tmp_path)
    dense = model_of(model_type, tmp_path, kept=9)
    stacks = [p for p in packed.parameters() if isinstance(p, QuantizedStack)]
    assert len(stacks) == 4
    assert not [p for p in dense.parameters() if isinstance(p, QuantizedStack)]
    ids = torch.randint(5, VOCABULARY - 8, (2, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (packed, dense):
        adapted, _ = apply_lora(model, LoraConfig(r=4), PLAN, seed=0)
        assert sum(isinstance(m, peft.tuners.lora.layer.ParamWrapper) for m in adapted.modules()) == 4
        random_b(adapted)
        adapted(input_ids=ids).logits.square().mean().backward()
        gradients = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
        with torch.no_grad():
            found.append((adapted, adapted(input_ids=ids).logits, gradients))
    (adapted, logits, gradients), (_, wanted, others) = found
    assert torch.equal(logits, wanted)
    assert any(".experts." in name for name in gradients)
    for name, gradient in others.items():
        assert torch.equal(gradients[name], gradient), name
    wrapper = next(m for m in adapted.modules() if isinstance(m, peft.tuners.lora.layer.ParamWrapper))
    with pytest.raises(FtcliError, match=r"FT332.*layers\.0\.mlp\.experts\.down_proj"):
        wrapper.merge()


@pytest.mark.parametrize(("model_type", "init"), in_turn(SPARSE, ["pretrained", "random"]))
def test_stacks_are_quantized_listed_and_counted_to_the_byte(model_type: str, init: str, tmp_path: Path) -> None:
    shape = shape_of(build_sparse(model_type).config.to_dict())
    assert shape is not None
    for settings in (NF4, SINGLE):
        for kept in (0, 1):
            model = model_of(model_type, tmp_path, settings, init=init, kept=kept)
            table = [*quantized_layers(model), *quantized_stacks(model)]
            bytes_quantized = {each.layer: each.bytes for each in table}
            names = {each.layer.removesuffix(".weight") for each in table}
            others = sum(p.nbytes for n, p in model.named_parameters() if n.removesuffix(".weight") not in names)
            assert sum(bytes_quantized.values()) + others == weight_bytes(settings, shape, 4, dequantized_layers=kept)
            for each in quantized_stacks(model):
                first = ".layers.0." in each.layer
                stack = model.get_parameter(each.layer)
                assert each.dequantized == (first and kept > 0)
                assert isinstance(stack, nn.Parameter if each.dequantized else QuantizedStack)
                assert each.shape == tuple(stack.shape)
                assert plain_fields(each)["shape"] == list(stack.shape)
            assert len(quantized_stacks(model)) == sum(len(layer.stacks) for layer in shape.layers)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_stacks_in_fp8_have_the_numbers_of_their_rows(model_type: str, tmp_path: Path) -> None:
    """One copy of e4m3: half of 16 bits, and equal to the stack quantized as one matrix."""
    model = model_of(model_type, tmp_path, FP8)
    shape = shape_of(model.config.to_dict())
    assert shape is not None
    whole = build_sparse(model_type).state_dict()
    stacks = {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedStack)}
    assert len(stacks) == 2 * sum(bool(layer.stacks) for layer in shape.layers) > 0
    for name, stack in stacks.items():
        rows = quantize_rows(whole[name].reshape(-1, whole[name].shape[-1]))
        assert torch.equal(stack + 0, rows.dequantize(torch.float32).view(stack.shape))
        assert 0 < float((stack + 0 - whole[name]).norm() / whole[name].norm()) < 0.04
        assert stack.stored_bytes == stack.numel() + 4 * stack.shape[0] * stack.shape[1]
    counted = weight_bytes(FP8, shape, 4)
    held = sum(each.bytes for each in [*quantized_layers(model), *quantized_stacks(model)])
    names = {each.layer.removesuffix(".weight") for each in [*quantized_layers(model), *quantized_stacks(model)]}
    held += sum(p.nbytes for n, p in model.named_parameters() if n.removesuffix(".weight") not in names)
    # Where stacks are stored the other way round a scale is an input's.
    assert held == counted if model_type == "qwen3_moe" else held == pytest.approx(counted, rel=0.02)
    with pytest.raises(FtcliError, match=r"FT332.*stored in fp8"), torch.no_grad():
        next(iter(stacks.values())).zero_()


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_kept_layers_hold_the_numbers_of_the_packed_ones(init: str, tmp_path: Path) -> None:
    """They held those before quantization: the loss then depended on how much memory there was."""
    packed, kept = (model_of("qwen3_moe", tmp_path, init=init, kept=kept) for kept in (0, 9))
    for name, stack in packed.named_parameters():
        if isinstance(stack, QuantizedStack):
            assert torch.equal(kept.get_parameter(name), stack + 0), name
    ids = torch.randint(5, VOCABULARY - 8, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(packed(input_ids=ids).logits, kept(input_ids=ids).logits)


def test_random_stacks_are_drawn_alike_and_have_the_models_spread(tmp_path: Path) -> None:
    one, again = (model_of("qwen3_moe", tmp_path, init="random") for _ in range(2))
    stacks = {name: p for name, p in one.named_parameters() if isinstance(p, QuantizedStack)}
    assert len(stacks) == 4
    for name, stack in stacks.items():
        assert same(stack, again.get_parameter(name))
        assert float((stack + 0).std()) == pytest.approx(one.config.initializer_range, rel=0.1)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_of_single_files_are_packed_name_by_name(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host holds the parts of one stack at most, whatever the number of layers."""
    held: list[set[str]] = []
    plain: Callable[..., None] = Renaming.keep_part

    def watched(self: Renaming, *arguments: Any) -> None:
        plain(self, *arguments)
        held.append(set(self._parts))

    monkeypatch.setattr(Renaming, "keep_part", watched)
    build(model_type, num_hidden_layers=3).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    ordered = sorted(stored)  # as safetensors and the files of large models have them: by name
    save_file({name: stored[name] for name in ordered}, tmp_path / "model.safetensors", {"format": "pt"})
    model = load(tmp_path)
    assert len([p for p in model.parameters() if isinstance(p, QuantizedStack)]) == 6
    assert len(held) == 3 * 4 * 3
    layers = [{name.split(".")[2] for name in names} for names in held]
    assert max(map(len, held)) <= 2  # of one layer: gate and up of an expert lie before and behind its down
    assert max(map(len, layers)) == 1


@pytest.mark.parametrize(("model_type", "part"), [("mixtral", "w1"), ("qwen3_moe", "up_proj")])
@pytest.mark.parametrize("damage", ["missing", "misshaped", "not a number"])
def test_an_expert_that_is_damaged_is_refused(model_type: str, part: str, damage: str, tmp_path: Path) -> None:
    build(model_type).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(n for n in sorted(stored) if f".1.{part}" in n and ".layers.1." in n)
    if damage == "missing":
        del stored[name]
    elif damage == "misshaped":
        stored[name] = stored[name][:-1].contiguous()
    else:
        stored[name][2, 3] = float("nan")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(FtcliError, match=r"FT323.*experts") as caught:
        load(tmp_path)
    if damage == "not a number":
        assert "layers.1.mlp.experts.gate_up_proj" in str(caught.value)
