"""The costliest loops of a training step on CPUs, in C: compiled where they run, if possible.

The plain torch in ``draft_trainer.drafters`` (``attention``, ``loss``, ``ops``) is the reference of
each: it runs on every device, in float64 too, and tests compare the two.
"""
