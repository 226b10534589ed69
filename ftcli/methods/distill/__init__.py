"""Distillation: a student learns the distribution of a teacher on its own answers."""
