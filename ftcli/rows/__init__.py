"""Rows: where data lies, how its files are read, and what a row of each layout means. Imports no torch.

Below `preflight`, so that a check of the first rows and the reading of all rows are the same code.
"""
