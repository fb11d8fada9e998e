"""Does adapting pay? Whole GRPO runs on the same cores, counted from start to end."""
