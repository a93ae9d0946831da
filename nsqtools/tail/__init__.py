"""Tail topics, peek into channels, and end a run by limits."""
