"""Draft releases swapped under load on real vLLM servers, against vLLM's own three-call path."""


def file_engine_name() -> str:
    """Name of the peer's weight-transfer back end (``file_engine``, which only vLLM imports)."""
    return "benchmark-file"
