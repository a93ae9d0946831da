"""What surrounds a command: streams, signals, logs, errors, exit status."""
