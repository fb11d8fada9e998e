"""``draft-trainer warmup``: a fixed policy's rollouts, through the bridge to a ``LocalTrainer``."""
