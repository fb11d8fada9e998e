"""EAGLE-3 (arXiv 2503.01840): a decoder layer over fused auxiliary states of the policy."""
