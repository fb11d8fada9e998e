"""The ``draft-trainer`` command."""
