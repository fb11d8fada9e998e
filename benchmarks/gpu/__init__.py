"""The trainer and the bridge on a GPU: what is right, how fast, and what it shares."""
