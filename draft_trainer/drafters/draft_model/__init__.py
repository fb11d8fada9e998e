"""External draft models: a small causal language model with the policy's vocabulary."""
