"""Everything that can go wrong with a publish, over real processes, again and again."""
