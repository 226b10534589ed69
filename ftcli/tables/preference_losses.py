"""Losses of preference methods, one row each: their arithmetic is a function of answers' log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """One loss.

    Attributes:
        code: A function ``(Answers, LossSettings) -> (pairs,) tensor`` (:mod:`ftcli.methods.preference.losses`), or
            ``(LabelledAnswers, LabelSettings) -> (rows,) tensor`` (:mod:`ftcli.methods.kto.objective`).
        beta: Default of ``preference.beta``; None where it has to be written.
        smooths: Whether ``label_smoothing`` has a meaning.
        paired: Whether it compares two answers to one prompt; else each answer has a label.
        estimates_kl: Whether it needs the KL of the step, from mismatched rows.
    """

    name: str
    code: str
    source: str
    beta: float | None = 0.1
    reference: bool = True
    smooths: bool = False
    averaged: bool = False
    paired: bool = True
    estimates_kl: bool = False


def _row(name: str, source: str, beta: float | None = 0.1, **more: bool) -> PreferenceLoss:
    module = "preference" if more.get("paired", True) else "kto"
    return PreferenceLoss(name, f"ftcli.methods.{module}.losses:{name}", source, beta, **more)


TABLE: Mapping[str, PreferenceLoss] = {
    row.name: row
    for row in (
        _row("sigmoid", "Rafailov et al. 2023, arXiv:2305.18290; smoothed: Mitchell 2023, cDPO", smooths=True),
        _row("sigmoid_norm", "Lambert et al. 2024 (Tulu 3), arXiv:2411.15124", None, smooths=True, averaged=True),
        _row("ipo", "Azar et al. 2023, arXiv:2310.12036", None, averaged=True),
        _row("hinge", "Zhao et al. 2023 (SLiC), arXiv:2305.10425", smooths=True),
        _row("robust", "Chowdhury et al. 2024, arXiv:2403.00409", smooths=True),
        _row("apo_zero", "D'Oosterlinck et al. 2024, arXiv:2408.06266"),
        _row("apo_down", "D'Oosterlinck et al. 2024, arXiv:2408.06266"),
        _row("bco_pair", "Jung et al. 2024, arXiv:2404.04656"),
        _row("nca_pair", "Chen et al. 2024, arXiv:2402.05369", 0.01),
        _row("sppo_hard", "Wu et al. 2024, arXiv:2405.00675", 0.001),
        _row("discopop", "Lu et al. 2024, arXiv:2406.08414"),
        _row("simpo", "Meng et al. 2024, arXiv:2405.14734", 2.0, reference=False, averaged=True),
        _row("cpo", "Xu et al. 2024, arXiv:2401.08417", reference=False, smooths=True),
        _row("orpo", "Hong et al. 2024, arXiv:2403.07691", reference=False, averaged=True),
        _row("kto", "Ethayarajh et al. 2024, arXiv:2402.01306", paired=False, estimates_kl=True),
        _row("apo_zero_unpaired", "D'Oosterlinck et al. 2024, arXiv:2408.06266", paired=False),
    )
}


def names(paired: bool | None = None) -> tuple[str, ...]:
    """Every loss of pairs, or of labelled answers; of both for None."""
    return tuple(name for name, row in TABLE.items() if paired in (None, row.paired))


def row(name: str) -> PreferenceLoss:
    return TABLE[name]
