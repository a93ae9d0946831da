"""Durable files: atomic replacement, locks and safe opening, for everything that writes files."""
