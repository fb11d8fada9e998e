"""The life of a release: candidate, gate, registry, publishing over the fleet."""
