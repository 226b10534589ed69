"""Loggers beside metrics.jsonl: a file for each, opened by :mod:`ftcli.run.loggers.opened` as the recipe says.

A new one is a module with a function like those here, and a row in :mod:`ftcli.tables.loggers`.
"""
