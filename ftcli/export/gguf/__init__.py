"""GGUF, what llama.cpp and Ollama serve: names, metadata, tokenizer, files, and how each is verified."""
