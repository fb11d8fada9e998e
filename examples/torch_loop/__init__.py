"""A GRPO loop in plain PyTorch; ``python -m examples.torch_loop.train`` runs it."""
