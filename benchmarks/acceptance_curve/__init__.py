"""Acceptance in real vLLM against what it took to train the draft, ours and speculators."""
