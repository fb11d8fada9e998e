"""What the rollout server's metrics cost it in throughput."""
