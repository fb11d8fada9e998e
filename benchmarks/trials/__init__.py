"""Trials of releases that are interrupted, replaced or without traffic, over real processes."""
