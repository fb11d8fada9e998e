"""Arithmetic GRPO: a small verifiable task, its policy, and the GRPO maths of the demo."""
