"""How much memory a run needs, which checkpointing policy that leaves, and what helps where it does not fit."""
