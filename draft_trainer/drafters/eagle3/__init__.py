"""The EAGLE-3 head, its unrolled objective and the acceptance it predicts."""
