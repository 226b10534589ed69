"""Facts known before anything is built: of a model from its config.json, of a machine, of the recipe's dtypes.

Nothing here imports torch but :func:`ftcli.facts.device.probe_device`, which asks the machine what it is.
"""
