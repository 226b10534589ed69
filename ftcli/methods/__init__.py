"""Training methods, a folder each: its objective, and what belongs to it alone."""
