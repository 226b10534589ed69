"""Generation: prompts in, tokens out, many rows at once, on the model as it is trained. See docs/generation.md."""
