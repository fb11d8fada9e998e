"""Draft releases swapped under load on real vLLM servers, against vLLM's own three-call path."""

PEER_BACKEND = "benchmark-file"
"""The peer's weight-transfer back end (``file_engine``, which only vLLM imports)."""
