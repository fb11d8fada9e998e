"""Accepted samples kept on disk for ``draft-trainer init`` and ``fit``."""
