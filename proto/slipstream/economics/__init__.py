"""Costs of engine steps and what speculation gains."""
