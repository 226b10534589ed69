"""NF4 models on a GPU: what loading takes, and training on the kernels against the dequantized weights."""

from __future__ import annotations

from collections.abc import Iterator

import peft
import pytest
import torch
from transformers import LlamaConfig

from ftcli.config.model import QuantizationConfig
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.load_quantized import ModelStorage, random_quantized
from ftcli.model.patch import patch
from ftcli.model.quantized import QuantizedLinear
from ftcli.tables.policies import PolicyName

pytestmark = [pytest.mark.gpu, pytest.mark.whole_card]

NF4 = QuantizationConfig(method="nf4")
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
NARROW = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")
    yield torch.device("cuda", 0)
    torch.cuda.empty_cache()


def test_loading_never_holds_the_full_model(cuda: torch.device) -> None:
    """Six layers of Llama-3.1-8B: 2.4 GiB in bfloat16. The peak is what stays and the temporaries of one matrix."""
    config = LlamaConfig(**WIDE, num_hidden_layers=6, vocab_size=1024)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = random_quantized(config, ModelStorage(NF4, torch.bfloat16, cuda), "sdpa", 0)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    full = sum(2 * layer.in_features * layer.out_features for layer in layers)
    assert held < 0.27 * full + 2**26
    assert peak - held < 0.75 * 2**30 < full - held


@pytest.mark.parametrize("policy", [False, "selective", "offload"])
def test_training_on_the_kernels_is_that_of_the_dequantized_weights(cuda: torch.device, policy: PolicyName) -> None:
    """Loss and every gradient in bfloat16, the same numbers packed and held in full."""
    config = LlamaConfig(**NARROW, num_hidden_layers=2, vocab_size=1024)
    ids = torch.randint(0, 1024, (2, 512), generator=torch.Generator().manual_seed(0)).to(cuda)

    def run(dequantized_layers: int) -> tuple[float, dict[str, torch.Tensor]]:
        base = random_quantized(config, ModelStorage(NF4, torch.bfloat16, cuda, dequantized_layers), "sdpa", 1)
        torch.manual_seed(2)
        model = peft.get_peft_model(
            base,
            peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False),
            autocast_adapter_dtype=True,
        )
        model.train()
        applied = patch(model, "auto")
        assert all(entry.on for entry in applied.table)
        use_checkpointing(model, policy)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.detach()), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}

    (packed, found), (dense, wanted) = run(0), run(2)
    assert packed == pytest.approx(dense, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-2, name
