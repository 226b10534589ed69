"""Loads exports again in a fresh process, with plain transformers, PEFT and gguf and nothing of the run.

``answering.py`` is that process; it imports none of ftcli's model code, and what it has imported is part of each
answer. ``process.py`` starts it and asks, in the words of ``request.py``.
"""
