"""Recipes: frozen, strict configuration models and the loader that knows where every value came from."""
