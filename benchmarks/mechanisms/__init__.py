"""Every draft mechanism beside no speculation, on one policy."""
