"""The ways in which EAGLE-3 drafts are written to disk, one file each."""
