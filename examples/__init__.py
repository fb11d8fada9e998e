"""Runnable examples for Slipstream."""
