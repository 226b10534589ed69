"""BitNet's layers on a GPU: the integers of plain torch at a real model's shapes, and whole models on either form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.bitlinear import bit_linear, bit_linear_reference, quantize_int8, round_weight
from ftkernels.ternary import ternarise

from ftcli.config.model import QuantizationConfig
from ftcli.model import bitnet
from ftcli.model.bitnet import BitLinear
from ftcli.model.quantized import layers_to_quantize
from tests import small_models

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("inner", "outer"), [(2560, 640), (2560, 6912), (6912, 2560)])
@pytest.mark.parametrize("rows", [1, 300, 4096])
def test_a_layer_of_2b_4t_has_the_bits_of_plain_torch(rows: int, inner: int, outer: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16) * 3
    w = torch.randn(outer, inner, device="cuda") * 0.02
    plain, ours = ternarise(w), round_weight(w)
    assert float(ours.scale) == float(plain.scale)
    assert torch.equal(ours.data, plain.data)
    found = []
    for backend in ("torch", "triton"):
        leaf, masters = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = bit_linear(quantize_int8(leaf, backend=backend), masters, plain, backend=backend)  # type: ignore[arg-type]
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
        found.append((y.detach(), leaf.grad, masters.grad))
    for one, two in zip(*found, strict=True):  # backward's operands are the same bits as well
        assert torch.equal(one, two)
    leaf, masters = x.double().requires_grad_(), w.double().requires_grad_()
    y = bit_linear_reference(leaf, masters, None, ternarise(w))
    torch.manual_seed(1)
    y.backward(torch.randn_like(found[1][0]).double())
    for mine, exact in zip(found[1], (y.detach(), leaf.grad, masters.grad), strict=True):
        assert float((mine.double() - exact).norm() / exact.norm()) < 4e-3  # a rounding to bfloat16 is 2e-3


@pytest.mark.parametrize("family", ["bitnet", "llama"])
def test_a_model_trains_on_the_kernels_as_in_plain_torch(family: str) -> None:
    ids = torch.randint(8, 250, (4, 200), generator=torch.Generator().manual_seed(0)).cuda()
    losses: list[list[float]] = []
    for kernels in (False, True):
        model: Any = small_models.build(family).cuda()
        for name in layers_to_quantize(model):
            linear = model.get_submodule(name)
            model.set_submodule(name, bitnet.bit_linear_of(linear, QuantizationConfig(method="bitnet"), name))
        bitnet.round_in_norms(model, kernels=kernels)
        assert {m.backend for m in model.modules() if isinstance(m, BitLinear)} == {"auto" if kernels else "torch"}
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
        losses.append([])
        for _ in range(12):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(loss.detach()))
    plain, fused = losses
    assert plain[0] == pytest.approx(fused[0], rel=1e-3)
    assert fused[-1] < fused[0] - 0.3
    assert plain[-1] == pytest.approx(fused[-1], rel=0.03)


def test_a_unit_of_squared_relus_keeps_two_tensors_and_is_not_widened() -> None:
    """Autocast on a GPU squares in float32: 14 bytes a feature in place of 6, half of all that such a layer keeps."""
    rows, sizes = 512, []
    for fused in (False, True):
        model: Any = small_models.build("bitnet").cuda()
        for name in layers_to_quantize(model):
            linear = model.get_submodule(name)
            model.set_submodule(name, bitnet.bit_linear_of(linear, QuantizationConfig(method="bitnet"), name))
        bitnet.round_in_norms(model, kernels=True)
        mlp = model.train().model.layers[0].mlp
        assert isinstance(mlp, bitnet.RoundedMlp)
        if not fused:
            mlp.gate_proj.backend = "torch"
        x = torch.randn(rows, model.config.hidden_size, device="cuda", requires_grad=True)
        kept: dict[int, int] = {}

        def packed(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t), torch.autocast("cuda", torch.bfloat16):
            out = mlp(x)
        sizes.append(sum(kept.values()))
        out.float().sum().backward()
        assert x.grad is not None
    assert sizes[0] - sizes[1] >= 8 * rows * model.config.intermediate_size
