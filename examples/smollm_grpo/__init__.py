"""GRPO on SmolLM2-135M-Instruct over tasks of reasoning-gym, on two CPU cores."""
