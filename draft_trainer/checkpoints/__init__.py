"""Checkpoints as users have them, read: of drafts in every layout, and of policies."""
