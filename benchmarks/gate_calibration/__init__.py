"""Whether the gate's expected acceptance length is what vLLM then measures."""
