"""Measurements that a reader can repeat; see docs/benchmarks.md."""
