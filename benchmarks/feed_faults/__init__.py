"""Everything that can go wrong between policy and training, over real processes."""
