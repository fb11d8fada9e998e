"""The trainer's HTTP server: metrics, a read-only page, and the facts behind it as JSON."""
