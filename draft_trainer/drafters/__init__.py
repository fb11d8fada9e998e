"""Draft mechanisms: the states each needs, its loss, its acceptance, its checkpoint."""
