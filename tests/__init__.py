"""Tests of Slipstream; ``make test`` runs them all. Shared fixtures are in conftest.py."""
