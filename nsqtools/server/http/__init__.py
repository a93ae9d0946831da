"""The HTTP side of both daemons: routing, errors and headers as Go's, and the endpoints."""
