"""GRPO's training pass on our layers and our head, compared with TRL's own loss on plain log-probabilities."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.data.collate import documents_batch
from ftcli.errors import FtcliError
from ftcli.methods.grpo.advantages import without_spread
from ftcli.methods.grpo.losses import StepShape
from ftcli.methods.grpo.policy import PolicyScores, ScoredDocuments, allowed, check_parity, scored_loss
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.model import attention
from ftcli.model.fused import stack_of
from ftcli.model.patch import patch
from ftcli.model.tokenizer import load_tokenizer
from ftcli.plan.batches import Batches
from ftcli.plan.precision import DtypePlan
from tests.quantized import TINY, load

KINDS = {"LoRA": "none", "QLoRA": "nf4", "fp8": "fp8", "full": "none"}
LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
LEVELS = ["token", "sequence"]
PLAN = DtypePlan("float32", "float32", "float32", autocast=False, reason="a test")


class PlainTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's loss; log-probabilities out of all the logits of transformers' own forward pass."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        log_p = torch.log_softmax(logits[:, -logits_to_keep - 1 : -1].float() / self.temperature, -1)
        chosen = log_p.gather(2, input_ids[:, -logits_to_keep:, None]).squeeze(2)
        return chosen, -(log_p.exp() * log_p).sum(-1), None


#: Loss, gradients and mean entropy.
Result = tuple[Tensor, dict[str, Tensor], float]


@dataclass
class Both:
    """Our policy and TRL's trainer over one model."""

    model: Any
    ours: PolicyScores
    theirs: PlainTrainer
    trains_base: bool
    grpo: GrpoConfig

    def set(self, **settings: Any) -> None:
        self.grpo = self.grpo.model_copy(update=settings)
        for name, value in settings.items():
            setattr(self.theirs, name, value)
            setattr(self.theirs.args, name, value)
        self.theirs._entropy_bonus_enabled = self.grpo.entropy_coef != 0

    def of_ours(self, inputs: dict[str, Tensor], layout: str) -> Result:
        """On the kernels' torch form."""
        done = patch(self.model, "reference")
        stack = stack_of(self.model, torch.float32)
        self.ours._stack = None if isinstance(stack, str) else stack
        self.ours.batches = Batches(layout, "a test")  # type: ignore[arg-type]
        self.model.zero_grad(set_to_none=True)
        loss, metrics = scored_loss(self.ours, self.grpo, inputs, StepShape(1, 1))
        loss.backward()
        done.undo()
        return loss.detach(), self._gradients(), (metrics["entropy"] or [math.nan])[0]

    def of_theirs(self, inputs: dict[str, Tensor]) -> Result:
        """On the model as transformers built it."""
        self.model.zero_grad(set_to_none=True)
        loss = self.theirs._compute_loss(self.model, dict(inputs))
        loss.backward()
        return loss.detach(), self._gradients(), self.theirs._metrics["train"]["entropy"][-1]

    def _gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


def plain_trainer(model: Any, folder: Path) -> PlainTrainer:
    args = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=6, num_generations=3, max_completion_length=7,
        temperature=0.7, report_to="none", use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    return PlainTrainer(
        model=model, reward_funcs=[lambda completions, **_: [0.0] * len(completions)], args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 6}), processing_class=tokenizer,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    """Both of one kind, made once: pytest would make them again for each test that has other parameters as well."""
    attention.register()
    folder = tmp_path_factory.mktemp("trainers")
    return cache(lambda kind: _made(kind, folder))


@pytest.fixture(params=list(KINDS))
def both(request: pytest.FixtureRequest, made: Callable[[str], Both]) -> Both:
    return made(request.param)


def _two_layers(folder: Path) -> Path:
    """The tiny model's folder without weights and its last two layers: one has a window, and one has none."""
    model = folder / "model"
    if not model.exists():
        shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((TINY / "config.json").read_text())
        config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
        (model / "config.json").write_text(json.dumps(config))
    return model


def _made(kind: str, folder: Path) -> Both:
    torch.manual_seed(0)
    model = load(_two_layers(folder), QuantizationConfig(method=KINDS[kind]), init="random")
    if kind != "full":
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules="lm_head", task_type="CAUSAL_LM")
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    model.train()
    theirs = plain_trainer(model, folder)
    theirs.current_gradient_accumulation_steps = 1
    ours = PolicyScores(model, Batches("padded", "a test"), pad_token_id=0, temperature=0.7, device=torch.device("cpu"))
    return Both(model, ours, theirs, kind == "full", GrpoConfig(temperature=0.7, max_completion_length=7))


def batch(*, old: bool = True, silent: bool = True) -> dict[str, Tensor]:
    """Six completions as TRL pads them, from a policy that was a little different, the third and fourth without
    advantage.
    """
    torch.manual_seed(1)
    prompts, answers = [3, 5, 2, 4, 1, 5], [7, 2, 5, 1, 4, 6]
    ids = torch.randint(5, 250, (6, 12))
    mask = torch.zeros(6, 12, dtype=torch.int64)
    for row, (p, c) in enumerate(zip(prompts, answers, strict=True)):
        mask[row, 5 - p : 5 + c] = 1
    inputs = {
        "prompt_ids": ids[:, :5], "prompt_mask": mask[:, :5],
        "completion_ids": ids[:, 5:], "completion_mask": mask[:, 5:],
        "advantages": torch.tensor([1.2, -0.8, 0.0, 0.0, -1.5, 0.3]) if silent else torch.randn(6),
        "num_items_in_batch": mask[:, 5:].sum(),
    }  # fmt: skip
    if old:
        inputs["old_per_token_logps"] = -7.5 + 0.3 * torch.randn(6, 7)
        inputs["ref_per_token_logps"] = -7.5 + 0.3 * torch.randn(6, 7)
    return inputs


def same(both: Both, inputs: dict[str, Tensor], layout: str, entropy: bool = True) -> None:
    loss, gradients, mean = both.of_ours(inputs, layout)
    wanted, expected, wanted_mean = both.of_theirs(inputs)
    coarse = any("fp8" in type(module).__name__.lower() for module in both.model.modules())
    torch.testing.assert_close(loss, wanted, rtol=2e-2 if coarse else 2e-5, atol=1e-2 if coarse else 1e-6)
    assert gradients.keys() == expected.keys()
    assert max(float(g.norm()) for g in expected.values()) > 1e-4
    off = sum(float((gradients[n] - g).norm() ** 2) for n, g in expected.items()) ** 0.5
    size = sum(float(g.norm() ** 2) for g in expected.values()) ** 0.5
    assert off <= (0.1 if coarse else 1e-4) * size
    if entropy:
        assert mean == pytest.approx(wanted_mean, rel=2e-2 if coarse else 1e-4)


#: What the model is made of is below the log-probabilities and what is made of them above, so that every loss meets
#: one kind, and every other kind one loss of tokens and one of sequences.
CASES = [("LoRA", loss, level) for loss in LOSSES for level in LEVELS]
CASES += [(kind, *case) for kind in KINDS if kind != "LoRA" for case in (("dapo", "token"), ("luspo", "sequence"))]


@pytest.mark.parametrize(("both", "loss", "level"), CASES, indirect=["both"])
def test_every_loss_is_trls_own(both: Both, loss: str, level: str) -> None:
    both.set(loss_type=loss, importance_sampling_level=level, beta=0.0, epsilon_high=5.0 if loss == "cispo" else 0.28)
    # Rows without advantage are left out of ours, and their entropy with them: the mean is that of other rows.
    same(both, batch(), "unpadded", entropy=False)
    both.set(beta=0.04)
    same(both, batch(), "padded")


#: What TRL's losses can have besides.
MORE: dict[str, dict[str, Any]] = {
    "two-sided clip": {"delta": 1.4},
    "entropy bonus": {"entropy_coef": 0.05},
    "no bonus but a cost": {"entropy_coef": -0.05, "loss_type": "luspo"},
    "top entropy": {"top_entropy_quantile": 0.3, "loss_type": "grpo"},
    "both": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "beta": 0.04, "loss_type": "cispo", "epsilon_high": 5.0},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "off-policy mask of ratios of completions": {
        "off_policy_mask_threshold": 0.05, "importance_sampling_level": "sequence", "beta": 0.04,
    },
    "plain k3": {"beta": 0.3, "use_bias_correction_kl": False},
}  # fmt: skip
PLAIN = {
    "loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, "epsilon_high": 0.28, "delta": None,
    "entropy_coef": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_bias_correction_kl": True,
}  # fmt: skip


@pytest.mark.parametrize("way", list(MORE))
@pytest.mark.parametrize("both", ["LoRA"], indirect=True)
def test_what_a_loss_can_have_besides_is_trls_own(both: Both, way: str) -> None:
    inputs = batch()
    both.set(**PLAIN)
    plain, gradients, _ = both.of_ours(inputs, "padded")
    both.set(**MORE[way])
    try:
        same(both, inputs, "unpadded", entropy=bool(both.grpo.beta))
        found, others, _ = both.of_ours(inputs, "padded")
        assert not torch.equal(found, plain) or any(not torch.equal(g, gradients[n]) for n, g in others.items())
    finally:
        both.set(**PLAIN)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("both", ["LoRA"], indirect=True)
def test_a_teachers_advantage_is_one_of_tokens_as_trl_takes_it(both: Both, loss: str) -> None:
    inputs = batch(silent=False)
    inputs["teacher_per_token_logps"] = -7.5 + 0.3 * torch.randn(6, 7)
    both.set(**PLAIN)
    both.set(loss_type=loss, epsilon_high=5.0)
    both.grpo = both.grpo.model_copy(update={"teacher_coef": 0.7})
    try:
        mine = both.of_ours(inputs, "unpadded")
    finally:
        both.grpo = both.grpo.model_copy(update={"teacher_coef": 0.0})
    above = inputs["teacher_per_token_logps"] - inputs["old_per_token_logps"]
    wanted = both.of_theirs({**inputs, "advantages": inputs["advantages"][:, None] + 0.7 * above})
    both.set(**PLAIN)
    torch.testing.assert_close(mine[0], wanted[0], rtol=2e-5, atol=1e-6)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(mine[1][name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("loss", "change"), [("dapo", {}), ("grpo", {"beta": 0.1}), ("luspo", {"entropy_coef": 0.1})])
@pytest.mark.parametrize("both", ["LoRA"], indirect=True)
def test_what_stands_between_turns_bears_no_loss_as_in_trl(both: Both, loss: str, change: dict[str, Any]) -> None:
    inputs = batch(silent=False)
    inputs["tool_mask"] = torch.ones(6, 7, dtype=torch.int64)
    inputs["tool_mask"][0, 2:5] = inputs["tool_mask"][2, 1] = inputs["tool_mask"][4, 1:3] = 0
    inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    both.set(**PLAIN)
    both.set(loss_type=loss, **change)
    try:
        for layout in ("padded", "unpadded"):
            same(both, inputs, layout)
        changed = {**inputs, "completion_ids": inputs["completion_ids"].clone()}
        changed["completion_ids"][0, 2] = 9  # the model reads what was said to it
        assert not torch.equal(both.of_ours(inputs, "padded")[0], both.of_ours(changed, "padded")[0])
    finally:
        both.set(**PLAIN)


def test_parity_is_of_the_tokens_that_the_model_wrote(both: Both) -> None:
    inputs = batch()
    real = inputs["completion_mask"].bool()
    done = patch(both.model, "reference")
    both.ours.batches = Batches("unpadded", "a test")
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    both.model.eval()
    with torch.no_grad():
        said, _ = both.ours.log_probs(ids, mask, 7)
    both.model.train()
    inputs["tool_mask"] = torch.ones(6, 7, dtype=torch.int64)
    inputs["tool_mask"][0, 2:5] = 0
    said[0, 2:5] = 0.0  # nobody sampled them
    found = check_parity(both.ours, PLAN, inputs, said)
    assert (found.rows, found.tokens) == (2, 10)
    assert found.sampler_mean is not None
    assert found.sampler_mean < 1e-4
    with pytest.raises(FtcliError, match="completions were sampled with"):
        check_parity(both.ours, PLAN, inputs, said + real * 0.5)
    done.undo()


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_on_policy_as_well(both: Both, layout: str) -> None:
    both.set(loss_type="dapo", importance_sampling_level="token", beta=0.0, epsilon_high=0.2)
    same(both, batch(old=False, silent=False), layout)


def test_rows_without_advantage_cost_no_pass_and_entropy_is_that_of_the_others(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.set(loss_type="dapo", importance_sampling_level="token", beta=0.0, epsilon_high=0.2)
    documents: list[int] = []
    scores = PolicyScores._scores

    def counting(self: PolicyScores, model: Any, scored: ScoredDocuments, entropy_gradient: bool) -> Any:
        documents.append(len(scored.documents))
        return scores(self, model, scored, entropy_gradient)

    monkeypatch.setattr(PolicyScores, "_scores", counting)
    inputs = batch()
    _, _, mean = both.of_ours(inputs, "padded")
    kept = [0, 1, 4, 5]
    _, _, alone = both.of_ours({n: v if v.dim() == 0 else v[kept] for n, v in inputs.items()}, "padded")
    both.set(beta=0.1)  # the reference pulls at every row
    both.of_ours(inputs, "padded")
    assert documents == [4, 4, 6]
    assert mean == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_what_remains_has_the_bits_that_it_has_alone(both: Both, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both.set(loss_type="dapo", importance_sampling_level="token", beta=0.0, epsilon_high=0.2)
    inputs = batch()
    kept = [0, 1, 4, 5]
    loss, gradients, _ = both.of_ours(inputs, layout)
    alone = {name: value if value.dim() == 0 else value[kept] for name, value in inputs.items()}
    wanted, expected, _ = both.of_ours(alone, layout)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)  # a sum with zeros in it may round otherwise
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
    assert any(gradient.any() for gradient in gradients.values())
    monkeypatch.setattr("ftcli.methods.grpo.policy._without_part", lambda advantages, grpo: None)
    with_all, of_all, _ = both.of_ours(inputs, layout)
    coarse = any("fp8" in type(module).__name__.lower() for module in both.model.modules())
    torch.testing.assert_close(with_all, loss, rtol=1e-3 if coarse else 1e-5, atol=1e-4 if coarse else 1e-7)
    off = sum(float((gradients[name] - gradient).norm() ** 2) for name, gradient in of_all.items()) ** 0.5
    assert off <= (1e-2 if coarse else 1e-5) * sum(float(g.norm() ** 2) for g in of_all.values()) ** 0.5


def test_a_batch_without_any_advantage_steps_with_zero_gradients(both: Both) -> None:
    both.set(loss_type="grpo", importance_sampling_level="token", beta=0.0, epsilon_high=0.2)
    inputs = {**batch(), "advantages": torch.zeros(6)}
    loss, gradients, entropy = both.of_ours(inputs, "padded")
    assert loss.item() == 0.0
    assert gradients.keys() == {name for name, p in both.model.named_parameters() if p.requires_grad}
    assert not any(gradient.any() for gradient in gradients.values())
    assert math.isnan(entropy)  # there is none to tell


@pytest.mark.parametrize(
    ("cut", "silent", "beta"),
    [([1, 4], False, 0.0), ([1, 4], True, 0.04), (range(6), False, 0.0), (range(6), True, 0.0)],
)
def test_entropy_of_what_masked_completions_leave_is_trls(
    both: Both, cut: Sequence[int], silent: bool, beta: float
) -> None:
    """Of nothing it is 0, whether rows have an advantage or not."""
    both.set(loss_type="dapo", importance_sampling_level="token", beta=beta, epsilon_high=0.2)
    inputs = batch(silent=silent)
    inputs["completion_mask"] = inputs["completion_mask"].index_fill(0, torch.tensor(list(cut)), 0)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    loss, _, mean = both.of_ours(inputs, "padded")
    wanted, _, wanted_mean = both.of_theirs(inputs)
    torch.testing.assert_close(loss, wanted, rtol=2e-2, atol=1e-2)
    assert mean == pytest.approx(wanted_mean, rel=2e-2, abs=0)


def test_entropy_of_rows_without_advantage_is_not_told(both: Both) -> None:
    both.set(loss_type="dapo", importance_sampling_level="token", beta=0.0, epsilon_high=0.2)
    inputs = batch()
    inputs["completion_mask"] = inputs["completion_mask"].index_fill(0, torch.tensor([0, 1, 4, 5]), 0)
    assert math.isnan(both.of_ours(inputs, "padded")[2])


def test_the_reference_of_adapters_is_the_model_without_them(both: Both) -> None:
    if both.trains_base:
        pytest.skip("its reference is a second model")
    inputs = batch()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad(), both.model.disable_adapter():
        wanted, _, _ = both.theirs._get_per_token_logps_and_entropies(both.model, ids, mask, 7)
        done = patch(both.model, "reference")
        both.ours.batches = Batches("unpadded", "a test")
        found, _ = both.ours.log_probs(ids, mask, 7, rows_at_a_time=4)
        done.undo()
    real = inputs["completion_mask"].bool()
    coarse = any("fp8" in type(module).__name__.lower() for module in both.model.modules())
    torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=0.1 if coarse else 1e-4)
    assert not found[~real].any()


def test_log_probabilities_agree_before_the_first_step(both: Both) -> None:
    inputs = batch()
    real = inputs["completion_mask"].bool()
    done = patch(both.model, "reference")
    both.ours.batches = Batches("unpadded", "a test")
    found = check_parity(both.ours, PLAN, inputs, None)
    assert (found.rows, found.tokens, found.sampler_mean) == (2, 13, None)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    both.model.eval()
    with torch.no_grad():
        said, _ = both.ours.log_probs(ids, mask, 7)
    both.model.train()
    assert check_parity(both.ours, PLAN, inputs, said).sampler_mean < 1e-5
    with pytest.raises(FtcliError, match="completions were sampled with") as error:
        check_parity(both.ours, PLAN, inputs, said + real * 0.5)
    assert error.value.findings[0].code == "FT708"
    assert both.model.training
    done.undo()


def test_what_rounding_does_to_coarse_products_is_let_pass(both: Both) -> None:
    coarse = any("fp8" in type(module).__name__.lower() for module in both.model.modules())
    embeddings = both.model.get_input_embeddings()
    before = list(embeddings._forward_hooks)
    both.ours.batches = Batches("unpadded", "a test")
    found = check_parity(both.ours, PLAN, batch(), None)
    assert list(embeddings._forward_hooks) == before
    assert (found.rounding_mean is not None) == coarse
    if found.rounding_mean is not None:
        assert 0 < found.rounding_mean < 0.05
    assert found.allowed_mean == (0.3 if coarse else 0.001)
    bfloat16 = DtypePlan("bfloat16", "float32", "bfloat16", autocast=True, reason="a test")
    assert allowed(bfloat16, None, coarse=False) == allowed(bfloat16, 0.1, coarse=True) == 0.3
    assert allowed(bfloat16, 0.25, coarse=True) == allowed(bfloat16, 0.25, coarse=False) == 0.5
    assert [allowed(PLAN, 1e-6, coarse=coarse) for coarse in (False, True)] == [0.001, 0.3]


@pytest.mark.parametrize("fault", ["temperature", "neighbours"])
def test_a_fault_in_the_training_pass_stops_the_run(both: Both, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftcli.methods.grpo import policy

    real = policy.next_token_log_probs if fault == "temperature" else policy.hidden_states

    def broken(*args: Any, **kwargs: Any) -> Any:
        if fault == "temperature":
            return real(*args, **{**kwargs, "temperature": 1.0})
        model, inputs, stack = args
        return real(model, {"input_ids": inputs["input_ids"]}, stack)

    monkeypatch.setattr(policy, "next_token_log_probs" if fault == "temperature" else "hidden_states", broken)
    both.ours.batches = Batches("unpadded", "a test")
    with pytest.raises(FtcliError, match="not the model's own") as error:
        check_parity(both.ours, PLAN, batch(), None)
    assert error.value.findings[0].code == "FT707"


def test_groups_without_spread_are_found() -> None:
    nothing = float("nan")
    alike, other, whole = [0.1, 1.0], [0.1, 0.0], [0.7, nothing]
    groups = [[alike] * 3, [other, alike, alike], [whole, [nothing] * 2, whole], [[nothing] * 2] * 3]
    rewards = torch.tensor(groups).view(12, 2)
    summed = GrpoConfig(num_generations=3)
    assert without_spread(rewards, torch.tensor([1.0, 0.5]), summed).tolist() == [True, False, True, True]
    assert without_spread(rewards, torch.tensor([1.0, 0.0]), summed).tolist() == [True, True, True, True]
    # One reward makes up for the other: a sum without spread, of rewards that have it.
    swapped = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]]).view(3, 2)
    each = GrpoConfig(num_generations=3, multi_objective_aggregation="normalize_then_sum")
    assert without_spread(swapped, torch.ones(2), summed).tolist() == [True]
    assert without_spread(swapped, torch.ones(2), each).tolist() == [False]
    assert without_spread(rewards, torch.tensor([1.0, 0.0]), each).tolist() == [True, True, True, True]


def test_a_completion_without_a_prompt_is_scored_from_its_second_token() -> None:
    ids = torch.arange(8).view(1, 8) + 5
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0]])
    scored = ScoredDocuments.of(ids, mask, 4, [False])
    assert scored.where.tolist() == [[False, True, True, False]]
    for layout in ("padded", "unpadded"):
        made = documents_batch(scored.documents, Batches(layout, "a test"), 0)  # type: ignore[arg-type]
        assert (made["labels"][:, 1:] != -100).sum() == 2
