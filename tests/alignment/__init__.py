"""EAGLE-3 as it is trained and EAGLE-3 as vLLM serves it are the same thing."""
