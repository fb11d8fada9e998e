"""Speculation leaves the policy's output distribution alone."""
