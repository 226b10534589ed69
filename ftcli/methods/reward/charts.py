"""The report's charts of a run of reward modelling."""

from __future__ import annotations

from ftcli.run.report.curves import Chart, Curve

CHARTS = (
    Chart("Loss", (Curve("loss", "training", smooth=True), Curve("eval_loss", "held-out", dots=True))),
    Chart(
        "Pairs in the right order",
        (Curve("rewards/accuracies", "training", smooth=True), Curve("eval_accuracy", "held-out", dots=True)),
        share=True,
        note="a tie is one half",
    ),
    Chart(
        "Score",
        (Curve("rewards/chosen", "chosen", smooth=True), Curve("rewards/rejected", "rejected", smooth=True)),
    ),
    Chart(
        "Margin",
        (Curve("rewards/margins", "training", smooth=True), Curve("eval_margin", "held-out", dots=True)),
    ),
)

#: Key in eval.json, label, whether more is better, and whether it is a share.
SCORES = (
    ("accuracy", "Pairs in the right order", True, True),
    ("accuracy_of_like_length", "The same, of pairs of like length", True, True),
    ("margin", "Margin", True, False),
    ("chosen_reward", "Reward of chosen answers", True, False),
    ("rejected_reward", "Reward of rejected answers", False, False),
)
