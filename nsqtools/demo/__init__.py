"""Demo: the tool shows itself on daemons of its own, and removes everything afterwards."""
