"""Online training: learner, optimizer, state for a resume, the loop."""
