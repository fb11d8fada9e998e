"""The gRPC service and the HTTP server around the rest: stream, status, metrics, page."""
