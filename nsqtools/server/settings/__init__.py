"""What the daemons can be told, on a command line in Go's syntax or in a TOML file."""
