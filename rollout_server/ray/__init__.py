"""Rollout servers that Ray places."""
