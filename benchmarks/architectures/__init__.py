"""Policies of several architectures in real vLLM, each with an adapted draft."""
