"""Another model as the reference: TRL's loss and gradients, what the run says of its start, and that it is gone."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from ftcli.config.model import ModelConfig
from ftcli.data.tokens import unit_digest
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.tokenizer import foreign_tokens
from ftcli.methods.kto.reference import scored_ahead as labels_ahead
from ftcli.methods.preference.evaluate import PairEvaluator
from ftcli.methods.preference.objective import PairObjective, tell_start
from ftcli.methods.preference.pairs import SCORED, ScoredAnswers
from ftcli.methods.preference.reference import Reference, scored_ahead
from ftcli.methods.preference.train import Preference
from ftcli.model.tokenizer import load_tokenizer
from ftcli.plan.batches import Batches
from ftcli.run.inputs import Inputs
from ftcli.train import assembly
from ftcli.train import on_rows as other_model
from ftcli.train.on_rows import answered, require_same_tokens
from tests.unit.methods.kto import labelled
from tests.unit.methods.kto.test_reference import job_of as labelled_job
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, UNPADDED, epochs_of_pairs, require_same, step
from tests.unit.methods.preference.test_cache import job_of
from tests.unit.methods.preference.test_trl import LOSSES, theirs

NAME = "org/other"


def other_weights(folder: Path) -> Any:
    """The same layers with other random weights, twice as large: an answer's log-probabilities differ by nats."""
    model = steps.base_model(folder)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 2 * parameter.std().nan_to_num(0.1))
    return model.requires_grad_(False).eval()


def asked(model: Any, batches: Batches = PADDED, held_out: Any = (), **settings: Any) -> Reference:
    """What a run knows of such a reference."""
    job = job_of(batches=batches, lora=None, preference=settings)
    job.recipe.model.name_or_path = NAME
    found: Reference = Preference().ask_other(job, model, epochs_of_pairs(steps.rows()), held_out, None)
    return found


def objective(model: Any, reference: Reference, batches: Batches = PADDED, said: Any = None, **settings: Any) -> Any:
    from ftcli.methods.preference.losses import PairLoss
    from ftcli.methods.preference.settings import PreferenceConfig

    loss = PairLoss.of("dpo", PreferenceConfig.model_validate(settings))
    job, epochs = job_of(batches=batches, said=said), epochs_of_pairs(steps.rows())
    return PairObjective(job, model, epochs, loss, reference=reference, group=None, stack=None, sequence=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def trainer(folder: Path) -> DPOTrainer:
    """TRL's trainer of all weights, with a reference of other weights."""
    args = DPOConfig(
        output_dir=str(folder / "out"), report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    return DPOTrainer(
        model=steps.base_model(folder), ref_model=other_weights(folder), args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
    )  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_trls_with_a_reference_of_other_weights(trainer: DPOTrainer, name: str) -> None:
    settings = {"loss": name, "beta": LOSSES[name]}
    wanted = theirs(trainer, loss=[name], beta=LOSSES[name])
    for batches in (PADDED, UNPADDED):
        known = asked(trainer.ref_model, batches, **settings)
        made = objective(trainer.model, known, batches, **settings)
        require_same(step(made, trainer.model, [[3, 0], [5], [1, 4, 2]]), wanted)
    same = Reference(of_units=asked(steps.base_model(Path(trainer.args.output_dir)), **settings).of_units)
    alike = step(objective(trainer.model, same, **settings), trainer.model, [[0, 1, 2, 3, 4, 5]])
    assert wanted[0] != pytest.approx(alike[0], rel=1e-3), "the other weights make no difference"


def test_the_run_says_what_both_give_the_first_answers_and_ends_not(trainer: DPOTrainer) -> None:
    """A reference of one's own that differed as much would end the run (FT714)."""
    said: list[str] = []
    known = asked(trainer.ref_model)
    step(objective(trainer.model, known, said=said), trainer.model, [[0, 1, 2]])
    (line,) = (line for line in said if isinstance(line, str))
    scored = sum(sum(label >= 0 for label in row.labels) for row in steps.rows()[:6])
    assert known.of_units is not None
    assert f"{NAME} gives the first answers {known.of_units[:3, :2].sum() / scored:.4f} nats a token" in line
    with pytest.raises(FtcliError) as ended:
        step(objective(trainer.model, Reference(of_units=known.of_units)), trainer.model, [[0, 1, 2]])
    assert ended.value.findings[0].code == "FT714"


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_policy_is_held_to_its_own_start(trainer: DPOTrainer, folder: Path, method: str) -> None:
    """Fresh adapters change nothing; trained ones are no start. A resumed run has begun before."""

    def made(adapted: Any) -> Any:
        if method == "dpo":
            return objective(adapted, asked(trainer.ref_model))
        job, rows = labelled_job(lora=None, train={"per_device_train_batch_size": 8}), labelled.rows()
        found = labels_ahead(job, trainer.ref_model, labelled.epochs_of(rows), (), None)
        return labelled.objective_of(adapted, known=found.of_rows, other=NAME, started=False)

    fresh, trained = (steps.adapted_model(folder, trained=after) for after in (False, True))
    for adapted, fails in ((fresh, False), (trained, True)):
        run = made(adapted)
        batch = dict(run.micro_batch([0, 1], blank=False).inputs)
        divide = steps.divisors(run.micro_batch([0, 1], blank=False).counts)
        if not fails:
            assert run.loss(batch, divide).item() > 0
            continue
        with pytest.raises(FtcliError) as ended:
            run.loss(batch, divide)
        assert ended.value.findings[0].code == "FT714"


@pytest.mark.parametrize(("nats", "codes"), [(-1.0, []), (-6.4, []), (-6.7, ["FT715"])])
def test_a_reference_worse_than_a_guess_is_told(nats: float, codes: list[str]) -> None:
    """Among 256 tokens a guess has 5.55 nats."""
    assert math.log(256) == pytest.approx(5.545, abs=1e-3)
    told: list[Any] = []
    reporter: Any = SimpleNamespace(info=lambda line: None, finding=told.append)
    scored = ScoredAnswers(torch.full((2,), 3 * nats), torch.zeros(2))
    tell_start(NAME, {SCORED: torch.ones(2, 3)}, scored, scored, 256, reporter)
    assert [(one.code, one.severity) for one in told] == [(code, "warning") for code in codes]


def test_a_run_goes_on_with_what_it_knows_and_never_without_adapters(trainer: DPOTrainer, folder: Path) -> None:
    """Its checkpoint says that the reference was scored ahead; nothing here could compute it."""
    from ftcli.train.checkpoint_state import Progress

    adapted = steps.adapted_model(folder, trained=False)
    known = asked(trainer.ref_model)
    wanted = step(objective(adapted, known), adapted, [[0, 1, 2, 3]])
    for began in ("ahead", "live"):
        again = objective(adapted, known)
        again.restore({"reference": began}, Progress(1, 2, 0.0, 0))
        require_same(step(again, adapted, [[0, 1, 2, 3]]), wanted, rel=1e-6)


def test_held_out_pairs_are_compared_with_it_whatever_is_measured(trainer: DPOTrainer, folder: Path) -> None:
    """Not with the model without its adapters, and not with the model that is measured first."""
    documents = steps.rows()
    known = asked(trainer.ref_model, held_out=documents)
    for model in (steps.adapted_model(folder), steps.base_model(folder)):
        job = job_of()
        job.recipe.eval = SimpleNamespace(per_device_eval_batch_size=4)
        job.recipe.train.__dict__["method"] = "dpo"
        evaluator = PairEvaluator(job, documents, {}, None, known=dict(known.held_out), gone=True)
        (found,) = (evaluator.loss_of(model, documents).more,)
        measured = objective(model, known)
        measured.restore({"reference": "ahead"}, _progress())
        step(measured, model, [[0, 1, 2, 3, 4, 5]])
        assert found["margin"] == pytest.approx(measured.metrics()["rewards/margins"], rel=1e-4)
        assert "stop_change" not in found
        assert "stop_logp" in found


def _progress() -> Any:
    from ftcli.train.checkpoint_state import Progress

    return Progress(1, 2, 0.0, 0)


def test_without_training_only_what_is_held_out_is_scored(folder: Path) -> None:
    documents, model = steps.rows(), other_weights(folder)
    found = scored_ahead(job_of(lora=None), model, None, documents[:4], None)
    whole = scored_ahead(job_of(lora=None), model, epochs_of_pairs(documents), documents[:4], None)
    assert found.of_units is None
    assert found.held_out.keys() == {unit_digest(*documents[:2]), unit_digest(*documents[2:4])}
    for key, values in found.held_out.items():
        assert values == pytest.approx(whole.held_out[key], rel=1e-5)
    rows = labelled.rows()
    job = labelled_job(lora=None)
    alone = labels_ahead(job, model, None, rows[:3], None)
    assert alone.of_rows == {}
    wanted = labels_ahead(job, model, labelled.epochs_of(rows), rows[:3], None).held_out
    assert alone.held_out.keys() == wanted.keys()


# -- asked, and gone ---------------------------------------------------------------------------------------------------


def test_it_is_gone_before_the_answer_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its modules know of each other: two models are never in memory."""
    alive: list[weakref.ref[Any]] = []

    def built(job: Any) -> Any:
        model = steps.base_model(folder)
        model.__dict__["itself"] = model
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(assembly, "build_base", built)
    for name in ("put_on_kernels", "laid_out"):
        monkeypatch.setattr(assembly, name, lambda job, model, rows: None)
    monkeypatch.setattr(assembly, "begin_reading", lambda job: tuple)
    monkeypatch.setattr(assembly, "to_download", lambda job: 0)
    monkeypatch.setattr(assembly, "loaded_base", lambda job, model, read: Inputs(commit="abc"))
    monkeypatch.setattr(other_model, "_job_of_other", lambda job: job)
    monkeypatch.setattr(other_model, "require_same_tokens", lambda *words: None)
    job: Any = SimpleNamespace(report=SimpleNamespace(asked="some"), device=torch.device("cpu"))
    gc.disable()
    try:
        found = answered(job, lambda of_other, model: sum(p.numel() for p in model.parameters()), [1], [], None)  # type: ignore[list-item]
        assert alive[0]() is None
    finally:
        gc.enable()
    assert found is not None
    assert (found.found > 1000, found.inputs.commit) == (True, "abc")
    assert answered(job, lambda of_other, model: 1, [], [], None) is None, "nothing is asked"
    job.report.asked = None
    assert answered(job, lambda of_other, model: 1, [1], [], None) is None  # type: ignore[list-item]


def vocabulary(**tokens: int) -> Any:
    return SimpleNamespace(get_vocab=lambda: tokens)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"a": 1, "b": 2, "c": 3}, None),
        ({"a": 1, "b": 2, "c": 3, "more": 4}, None),
        ({"a": 1, "b": 2}, "1 of its tokens are others: id 3 is no token there and 'c' here"),
        ({"a": 1, "c": 3}, None),
        ({"b": 1, "a": 2, "c": 3}, "2 of its tokens are others: id 1 is 'b' there and 'a' here"),
    ],
)
def test_rows_have_to_mean_the_same_to_both(theirs: Any, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row has the token b: a model that lacks it reads all of them as they are meant."""
    monkeypatch.setattr(other_model, "load_tokenizer", lambda model, offline: vocabulary(**theirs))
    job: Any = SimpleNamespace(tokenizer=vocabulary(a=1, b=2, c=3))
    other: Any = SimpleNamespace(
        recipe=SimpleNamespace(model=None), session=SimpleNamespace(offline=True), facts=SimpleNamespace(name=NAME)
    )
    rows: Any = [SimpleNamespace(input_ids=[1, 1]), SimpleNamespace(input_ids=[3, 1])]
    if said is None:
        require_same_tokens(job, other, ([], rows))
        return
    with pytest.raises(FtcliError) as refused:
        require_same_tokens(job, other, ([], rows))
    (finding,) = refused.value.findings
    assert (finding.code, refused.value.exit_code) == ("FT326", ExitCode.PREFLIGHT)
    assert said in finding.message


def test_foreign_tokens_of_equal_vocabularies_are_none() -> None:
    assert foreign_tokens({1: "a"}, {1: "a", 2: "b"}, [1]) == ""
