"""Estimates the memory of a run, the checkpointing policy that fits, and the changes that help if none does."""
