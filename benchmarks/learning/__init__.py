"""Acceptance length by tokens and CPU seconds from a random head: ours beside speculators."""
