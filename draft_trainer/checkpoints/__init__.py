"""Draft checkpoints of every layout that users have, read, written and begun from scratch."""
