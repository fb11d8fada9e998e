"""Tests of the rollout server: units, and one real vLLM shared by the live ones."""
