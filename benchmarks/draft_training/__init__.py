"""One training step of ours and of the public EAGLE-3 trainers, on the same random case."""
