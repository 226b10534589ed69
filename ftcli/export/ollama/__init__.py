"""Ollama: a GGUF file and a Modelfile whose template renders what training rendered."""
