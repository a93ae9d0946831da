"""Durable files: atomic replacement, locks, safe opening, and the limit of open files."""
