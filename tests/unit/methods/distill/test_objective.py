"""The loss of distillation is its formula in float64 on whole logits, and TRL's DistillationTrainer's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from ftcli.data.asked import RenderedPrompt
from ftcli.methods.distill.objective import DistillObjective, Teacher
from ftcli.methods.distill.settings import DistillConfig
from ftcli.model.patch import patch
from ftcli.plan.batches import Batches
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Row
from ftcli.train.parallel import Divisors
from tests.small_models import build

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
TEXTS = ["5 6 7", "9 10", "11 12 13 14 15", "20"]


class Monitor:
    def enter(self, doing: Any) -> None: ...
    def check_finite(self) -> None: ...


def objective(model: Any, teacher: Teacher, layout: str = "padded", **settings: Any) -> DistillObjective:
    recipe = SimpleNamespace(
        run=SimpleNamespace(seed=1),
        model=SimpleNamespace(kernels="off"),
        train=SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=2),
    )
    job: Any = SimpleNamespace(
        recipe=recipe,
        report=SimpleNamespace(
            memory=SimpleNamespace(generator="kept", waiting=0), device=SimpleNamespace(available_bytes=None)
        ),
        dtypes=PLAN,
        device=torch.device("cpu"),
        stops=(4,),
        pad_token_id=0,
        reporter=SilentReporter(),
        batches=lambda model: Batches(layout, "a test"),  # type: ignore[arg-type]
        tokenizer=lambda text, add_special_tokens: {"input_ids": [[int(one) for one in each.split()] for each in text]},
    )
    asked = [RenderedPrompt(Prompt(Row("d", at, {}), None, text, None), text) for at, text in enumerate(TEXTS)]
    config = DistillConfig(max_prompt_length=16, max_completion_length=7, **settings)
    return DistillObjective(job, config, model, asked, teacher, None)


def adapted(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = peft.get_peft_model(
        build("gemma2"), peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules="lm_head")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def step_of(made: DistillObjective) -> tuple[float, list[Any]]:
    """The loss of a step by its micro-batches, which are backpropagated, and these."""
    made.begin(0)
    batches = made.micro_batches(0, Monitor())
    tokens = sum(one.counts.supervised for one in batches)
    divisors = Divisors(torch.tensor(float(tokens)), torch.tensor(0.0))
    total = 0.0
    for one in batches:
        loss = made.loss(dict(one.inputs), divisors)
        loss.backward()
        total += loss.item()
    made.reduced()
    return total, batches


def whole(model: Any, ids: list[int], temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_it_is_the_formula_over_the_tokens_of_the_step(beta: float, layout: str) -> None:
    model, other = adapted(), build("gemma2", seed=5).requires_grad_(False)
    if layout == "unpadded":
        for one in (model.get_base_model(), other):
            patch(one, "reference")
    made = objective(model, Teacher(other, Batches(layout, "a test")), layout, beta=beta, temperature=0.7)  # type: ignore[arg-type]
    prompts = [[int(token) for token in TEXTS[row].split()] for row in made.prompts_of(0)]
    with torch.no_grad():
        completions = [one.tokens for one in made._rollouts.complete(prompts, 0)]
    made._rollouts._step = -1  # the same draws again
    found, _ = step_of(made)
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for prompt, tokens in zip(prompts, completions, strict=True):
        rows = slice(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        a, b = whole(model, prompt + tokens, 0.7)[rows], whole(other, prompt + tokens, 0.7)[rows].detach()
        m = torch.logsumexp(torch.stack([a, b]), 0) - torch.log(torch.tensor(2.0, dtype=torch.float64))
        each = {
            0.0: b.exp() * (b - a), 1.0: a.exp() * (a - b), 0.5: 0.5 * (b.exp() * (b - m) + a.exp() * (a - m)),
        }[beta]  # fmt: skip
        total, count = total + each.sum(), count + len(tokens)
    (total / count).backward()
    assert found == pytest.approx((total / count).item(), rel=1e-5)
    assert gradients
    for name, one in model.named_parameters():
        if one.grad is not None:
            torch.testing.assert_close(gradients[name], one.grad, rtol=1e-3, atol=1e-6)


def test_it_is_trls() -> None:
    model, other = adapted(), build("gemma2", seed=5).requires_grad_(False)
    made = objective(model, Teacher(other, Batches("padded", "a test")), temperature=0.9)
    found, batches = step_of(made)
    total, tokens = 0.0, sum(one.counts.supervised for one in batches)
    for one in batches:
        ids, where = one.inputs["input_ids"], one.inputs["positions"]
        mask = torch.zeros(ids.numel())
        mask[where] = 1.0
        with torch.no_grad():
            mine, theirs = (
                each.model(input_ids=ids, attention_mask=one.inputs.get("attention_mask"), use_cache=False)[0]
                for each in (model.get_base_model(), other)
            )
        heads = [each.get_output_embeddings().weight for each in (model.get_base_model(), other)]
        cap = model.config.final_logit_softcapping
        loss, _, _ = _chunked_divergence_loss(
            mine, theirs, *heads, mask.view(ids.shape), 1.0, num_items_in_batch=tokens, temperature=0.9,
            student_final_logit_softcapping=cap, teacher_final_logit_softcapping=cap,
        )  # fmt: skip
        total += loss.item()
    assert found == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_from_itself_there_is_nothing_to_learn(beta: float) -> None:
    """The same weights as another model; and adapters that add nothing, against the model without them."""
    model = adapted()
    same = Teacher(model, Batches("padded", "a test"))
    total, _ = step_of(objective(model, same, beta=beta))
    assert abs(total) < 1e-6
    fresh = peft.get_peft_model(build("gemma2"), peft.LoraConfig(r=4, target_modules="all-linear"))
    total, _ = step_of(objective(fresh, Teacher(None, Batches("padded", "a test")), beta=beta))
    assert abs(total) < 1e-6
    assert all(float(one.grad.abs().max()) < 1e-6 for one in fresh.parameters() if one.grad is not None)


def test_the_base_that_sees_more_is_a_teacher() -> None:
    model = adapted()
    texts = [f"{text} 30 31" for text in TEXTS]
    total, batches = step_of(objective(model, Teacher(None, Batches("padded", "a test"), texts)))
    assert total > 1e-3
    for one in batches:
        assert one.inputs["teacher.positions"].numel() == one.inputs["positions"].numel()
        assert one.inputs["teacher.input_ids"].shape[1] == one.inputs["input_ids"].shape[1] + 2
    assert any(float(one.grad.abs().max()) > 0 for one in model.parameters() if one.grad is not None)


def test_metrics_are_means_and_are_taken_back() -> None:
    model = adapted()
    made = objective(model, Teacher(None, Batches("padded", "a test"), [f"{text} 30" for text in TEXTS]))
    step_of(made)
    state = made.state()
    made.undo(0)
    assert not [name for name in made.metrics() if name == "entropy"]
    made.restore(state, None)  # type: ignore[arg-type]
    assert made.metrics()["entropy"] is not None
