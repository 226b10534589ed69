"""README.md of adapters, models and exports: a model card filled from what the run has recorded."""

from ftcli.run.card.card import render_card, write_card

__all__ = ["render_card", "write_card"]
