"""Automatic draft length against every fixed one."""
