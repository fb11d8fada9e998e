"""GRPO whose generation and training overlap, on real vLLM."""
