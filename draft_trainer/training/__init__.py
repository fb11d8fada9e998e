"""Online training: learner, optimizer, ranks, state for a resume, the loop."""
