"""The options of the daemons, from a command line in Go's syntax or a TOML file."""
