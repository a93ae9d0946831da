"""The command lines of NSQ's Go utilities, as they are: their flags and meanings, on our engine."""
