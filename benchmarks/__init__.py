"""Placeholder docstring; see docs/architecture.md."""
