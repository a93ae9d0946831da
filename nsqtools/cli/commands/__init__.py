"""One module a command, or a family of commands; imported when one is chosen."""
