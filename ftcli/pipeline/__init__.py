"""The straight line: recipe, preflight, data, model, trainer, run directory, export. A file for each command.

Heavy libraries are imported inside the functions that need them, so that a faulty recipe is refused before torch loads.
"""
