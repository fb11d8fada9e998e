"""Real vLLM with a draft head and a policy that can be replaced while requests run."""
