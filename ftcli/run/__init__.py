"""The run directory: what a run writes, so that nothing is lost, doubled or misleading."""
