"""What to do with /metrics: a dashboard for Grafana and alerts for Prometheus, as files."""

from __future__ import annotations

from importlib.resources import files

FILES = {"dashboard": "dashboard.json", "alerts": "alerts.yaml"}


def text_of(what: str) -> str:
    """Return a file's text; ``what`` is a key of `FILES`."""
    return (files(__package__) / FILES[what]).read_text("utf-8")
