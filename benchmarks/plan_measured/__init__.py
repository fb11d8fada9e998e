"""The planner on a server of its own: predicted and measured step times and speed-ups."""
