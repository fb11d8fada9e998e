"""``draft-trainer fit``: training on recorded states, with log, plot and progress."""
