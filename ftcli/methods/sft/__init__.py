"""Supervised fine-tuning: the cross-entropy of the tokens that bear loss."""
