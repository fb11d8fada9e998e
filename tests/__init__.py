"""Tests of Slipstream: the fast ones by ``make test``, all by ``make test-all``."""
