"""Tests of Slipstream; ``make test`` runs them all. Fixtures that several areas share: conftest.py."""
