"""Data: rows are read, rendered by a chat template, masked, counted and collated. Nothing is changed silently."""
