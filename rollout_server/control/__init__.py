"""The control plane of a rollout server. Knows no vLLM."""
