"""Models: loading, adapters, and the way from token ids to hidden states and loss."""
