"""The server skeleton of both services: TLS, identity, limits, lifecycle."""
