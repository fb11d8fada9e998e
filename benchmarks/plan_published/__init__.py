"""``slipstream.economics.arithmetic`` against figures that others have published."""
