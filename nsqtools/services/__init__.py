"""What the commands do, without a terminal: usable from Python, tested without a process."""
