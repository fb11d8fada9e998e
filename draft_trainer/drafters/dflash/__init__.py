"""DFlash: a block draft, which proposes all its tokens in one forward pass."""
