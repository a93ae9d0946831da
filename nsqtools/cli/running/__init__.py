"""The environment of a command: streams, signals, logs, errors, exit status."""
