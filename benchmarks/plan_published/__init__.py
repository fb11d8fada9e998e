"""``slipstream.economics`` against figures that others have published."""
