"""Recipes of other tools, turned into ours: what they say, in our words, and what cannot be said here."""
