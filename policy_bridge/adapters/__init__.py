"""Thin adapters between training frameworks and the bridge. See docs/integrations.md.

They know a framework by the attributes they use, never by importing it: its
version is the training image's business.
"""
