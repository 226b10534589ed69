"""Evaluation: token-weighted loss without keeping logits, and tasks judged on generated text."""
