"""Certificates, tokens, roles, and what must not be in any output."""
