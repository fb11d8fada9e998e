"""The gain of speculation on a real language model: measured, chosen, and predicted."""
