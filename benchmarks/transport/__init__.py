"""From a captured tensor to a validated one in the replay buffer, and what the machine could do."""
