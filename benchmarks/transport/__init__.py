"""States from a bridge to a trainer: shared memory against gRPC inline and one memcpy."""
