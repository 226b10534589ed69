"""GGUF files: what they call a model's tensors, and how they are read. Writing them is export's."""
