"""Loads exports again in a fresh process, with plain transformers, PEFT and gguf and nothing of the run.

``program.py`` and ``answering.py`` are that process; neither imports ftcli's model code, and what they have imported is
part of each answer. ``process.py`` starts it and asks.
"""
