"""The gRPC service around the rest: server, status, metrics."""
