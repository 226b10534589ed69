"""README.md of adapters, models and exports: a model card filled from what the run has recorded."""

from ftcli.run.card.card import licence_of_base, public_base, render_card, write_card

__all__ = ["licence_of_base", "public_base", "render_card", "write_card"]
