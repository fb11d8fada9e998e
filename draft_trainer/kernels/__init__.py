"""The dearest loops of a training step on a CPU, in C: compiled where they run, if a compiler is.

The plain torch beside each of them (``soft_targets``, ``causal``) is the reference: it runs on
every device, in float64 too, and tests hold the two together.
"""
