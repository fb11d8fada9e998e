"""Measures what the bridge costs the policy's step, with its trainer in every state."""
