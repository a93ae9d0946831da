"""From a command line to a call: typer, made lazy, with help pages of our own."""
