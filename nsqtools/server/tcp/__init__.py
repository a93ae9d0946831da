"""The TCP side of both daemons: connections, their layers, and the commands of the protocols."""
