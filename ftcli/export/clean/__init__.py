"""Loads what was written again in a process that has nothing of a run in it: plain transformers, PEFT and gguf.

``program.py`` and ``answering.py`` are that process; neither imports ftcli's model code, and what they have imported is
part of each answer. ``process.py`` starts it and asks.
"""
