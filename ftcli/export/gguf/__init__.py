"""GGUF, what llama.cpp and Ollama serve: names, metadata, tokenizer, files, and what each is held against."""
