"""The report's charts of a run on pairs."""

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
        "Reward",
        (Curve("rewards/chosen", "chosen", smooth=True), Curve("rewards/rejected", "rejected", smooth=True)),
        note="beta x what the log-probability has gained over the reference",
    ),
    Chart(
        "Margin",
        (Curve("rewards/margins", "training", smooth=True), Curve("eval_margin", "held-out", dots=True)),
    ),
    Chart(
        "Log-probability of a token, nats",
        (Curve("logps/chosen", "chosen", smooth=True), Curve("logps/rejected", "rejected", smooth=True)),
        note="that of chosen answers falls in most runs; when it falls far, answers lose their shape",
    ),
)

#: Key in eval.json, label, whether more is better, and whether it is a share.
SCORES = (
    ("accuracy", "Pairs in the right order", True, True),
    ("accuracy_of_like_length", "The same, of pairs of like length", True, True),
    ("margin", "Margin", True, False),
    ("chosen_logp", "Chosen answers, nats per token", True, False),
    ("rejected_logp", "Rejected answers, nats per token", False, False),
    ("chosen_fell", "Chosen answers that became less likely", False, True),
)
