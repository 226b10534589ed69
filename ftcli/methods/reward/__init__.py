"""Reward models: one number for an answer, learnt from pairs (Bradley-Terry)."""
