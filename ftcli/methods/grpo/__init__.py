"""GRPO: completions in groups, rewards, advantages, and a clipped policy gradient."""
