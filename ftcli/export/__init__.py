"""Exports a run's result in the formats of other tools; each export is loaded again and compared."""
