"""The report's charts of a run on labelled answers."""

from __future__ import annotations

from ftcli.run.report.curves import Chart, Curve

CHARTS = (
    Chart("Loss", (Curve("loss", "training", smooth=True), Curve("eval_loss", "held-out", dots=True))),
    Chart(
        "Answers on their side",
        (Curve("rewards/accuracies", "training", smooth=True), Curve("eval_accuracy", "held-out", dots=True)),
        share=True,
        note="desirable answers that became likelier, and undesirable ones that became less likely",
    ),
    Chart(
        "Reward",
        (Curve("rewards/chosen", "desirable", smooth=True), Curve("rewards/rejected", "undesirable", smooth=True)),
        note="beta x what the log-probability has gained over the reference",
    ),
    Chart(
        "Margin",
        (Curve("rewards/margins", "training", smooth=True), Curve("eval_margin", "held-out", dots=True)),
        note="the mean reward of desirable answers less that of undesirable ones",
    ),
    Chart(
        "KL, nats",
        (Curve("kl", "training", smooth=True), Curve("eval_kl", "held-out", dots=True)),
        note="what answers to other prompts have gained over the reference: how far the model has moved",
    ),
    Chart(
        "Log-probability of a token, nats",
        (Curve("logps/chosen", "desirable", smooth=True), Curve("logps/rejected", "undesirable", smooth=True)),
    ),
)

#: Key in eval.json, label, whether more is better, and whether it is a share.
SCORES = (
    ("accuracy", "Answers on their side", True, True),
    ("chosen_rose", "Desirable answers that became likelier", True, True),
    ("rejected_fell", "Undesirable answers that became less likely", True, True),
    ("margin", "Margin", True, False),
    ("kl", "KL, nats", False, False),
    ("chosen_logp", "Desirable answers, nats per token", True, False),
    ("rejected_logp", "Undesirable answers, nats per token", False, False),
)
