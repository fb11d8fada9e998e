"""Checkpoints of policies, read for a new draft; ``slipstream.checkpoints`` reads any."""
