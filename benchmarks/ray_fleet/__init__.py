"""A fleet of real vLLM servers that Ray places: start, publish, loss of one, healing."""
