"""Generated from the .proto files in this folder by ``proto/hatch_build.py``."""
