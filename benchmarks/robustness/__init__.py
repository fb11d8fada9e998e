"""Hostile and broken clients against both gRPC services in real processes."""
