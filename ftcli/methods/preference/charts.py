"""The report's charts and scores of runs on preferences: one table for pairs, labelled answers and reward models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from ftcli.run.report.curves import Chart, Curve

#: What is learned from: pairs, labelled answers, or pairs for a reward model.
_PAIRS, _LABELLED, _SCORED = "pairs", "labelled", "scored"
_ORDERED, _LIKELY, _ALL = (_PAIRS, _SCORED), (_PAIRS, _LABELLED), (_PAIRS, _LABELLED, _SCORED)
#: What both answers are called.
_WORDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {_PAIRS: ("chosen", "rejected"), _LABELLED: ("desirable", "undesirable"), _SCORED: ("chosen", "rejected")}
)


def _both(metric: str) -> tuple[Curve, Curve]:
    """Curves of chosen and rejected answers, which :func:`_charts` gives their names."""
    return Curve(f"{metric}/chosen", "{one}", smooth=True), Curve(f"{metric}/rejected", "{other}", smooth=True)


def _beside(metric: str, held_out: str) -> tuple[Curve, Curve]:
    """Curves of training and of held-out rows."""
    return Curve(metric, "training", smooth=True), Curve(held_out, "held-out", dots=True)


_GAINED = "beta x what the log-probability has gained over the reference"
_RIGHT = _beside("rewards/accuracies", "eval_accuracy")
_MARGIN = Chart("Margin", _beside("rewards/margins", "eval_margin"))
_LOGPS = Chart("Log-probability of a token, nats", _both("logps"))
#: Charts in their order, and whose they are.
_CHARTS: tuple[tuple[tuple[str, ...], Chart], ...] = (
    (_ALL, Chart("Loss", _beside("loss", "eval_loss"))),
    (_ORDERED, Chart("Pairs in the right order", _RIGHT, share=True, note="a tie is one half")),
    (
        (_LABELLED,),
        Chart(
            "Answers on their side",
            _RIGHT,
            share=True,
            note="desirable answers that became likelier, and undesirable ones that became less likely",
        ),
    ),
    (_LIKELY, Chart("Reward", _both("rewards"), note=_GAINED)),
    ((_SCORED,), Chart("Score", _both("rewards"))),
    (_ORDERED, _MARGIN),
    ((_LABELLED,), replace(_MARGIN, note="the mean reward of desirable answers less that of undesirable ones")),
    (
        (_LABELLED,),
        Chart(
            "KL, nats",
            _beside("kl", "eval_kl"),
            note="what answers to other prompts have gained over the reference: how far the model has moved",
        ),
    ),
    (
        (_PAIRS,),
        replace(
            _LOGPS,
            note="that of chosen answers falls in most runs; when it falls far, answers lose their shape",
        ),
    ),
    ((_LABELLED,), _LOGPS),
    (
        _LIKELY,
        Chart(
            "Stop token after {one} answers, nats",
            (Curve("eval_stop_logp", "held-out log-probability", dots=True),),
            note="when it falls, answers go on until they are cut off",
        ),
    ),
)

#: Whose a score is; its key in eval.json, its label, whether more is better, and whether it is a share.
_SCORES: tuple[tuple[tuple[str, ...], str, str, bool, bool], ...] = (
    (_ORDERED, "accuracy", "Pairs in the right order", True, True),
    (_ORDERED, "accuracy_of_like_length", "The same, of pairs of like length", True, True),
    (_ORDERED, "accuracy_length_controlled", "The same, length-controlled", True, True),
    ((_LABELLED,), "accuracy", "Answers on their side", True, True),
    ((_LABELLED,), "chosen_rose", "Desirable answers that became likelier", True, True),
    ((_LABELLED,), "rejected_fell", "Undesirable answers that became less likely", True, True),
    (_ALL, "margin", "Margin", True, False),
    ((_LABELLED,), "kl", "KL, nats", False, False),
    (_LIKELY, "chosen_logp", "{One} answers, nats per token", True, False),
    (_LIKELY, "rejected_logp", "{Other} answers, nats per token", False, False),
    (_LIKELY, "stop_logp", "Stop token after {one} answers, nats", True, False),
    (_LIKELY, "stop_change", "The same, against the reference", True, False),
    ((_PAIRS,), "chosen_fell", "Chosen answers that became less likely", False, True),
    ((_SCORED,), "chosen_reward", "Reward of chosen answers", True, False),
    ((_SCORED,), "rejected_reward", "Reward of rejected answers", False, False),
)


def _charts(kind: str) -> Iterator[Chart]:
    for kinds, chart in _CHARTS:
        if kind in kinds:
            lines = tuple(replace(curve, name=_worded(curve.name, kind)) for curve in chart.curves)
            yield replace(chart, title=_worded(chart.title, kind), curves=lines)


def _scores(kind: str) -> Iterator[tuple[str, str, bool, bool]]:
    for kinds, key, label, more, share in _SCORES:
        if kind in kinds:
            yield key, _worded(label, kind), more, share


def _worded(text: str, kind: str) -> str:
    one, other = _WORDS[kind]
    return text.format(one=one, other=other, One=one.capitalize(), Other=other.capitalize())


CHARTS_OF_PAIRS, CHARTS_OF_LABELLED, CHARTS_OF_SCORED = (tuple(_charts(kind)) for kind in _ALL)
SCORES_OF_PAIRS, SCORES_OF_LABELLED, SCORES_OF_SCORED = (tuple(_scores(kind)) for kind in _ALL)
