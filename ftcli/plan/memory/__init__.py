"""How much memory a run needs, which checkpointing policy fits, and what helps where none does."""
