"""Prometheus' text format: metrics to the page that it scrapes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """``kind`` is ``gauge`` or ``counter``; each sample has its labels."""

    name: str
    kind: str
    help: str
    samples: Iterable[tuple[Mapping[str, str], float | int | str]]


def encode_metrics(metrics: Iterable[Metric]) -> str:
    """Return the text: each metric with its help and type, and a line for each sample."""
    return "\n".join(metric_lines(metrics)) + "\n"


def metric_lines(metrics: Iterable[Metric]) -> Iterator[str]:
    """Yield the lines, for those who make many in steps."""
    for metric in metrics:
        yield f"# HELP {metric.name} {_escape(metric.help)}"
        yield f"# TYPE {metric.name} {metric.kind}"
        for labels, value in metric.samples:
            yield f"{metric.name}{_labels(labels)} {value}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    quoted = (
        f'{name}="{_escape(value).replace(chr(34), chr(92) + chr(34))}"'
        for name, value in labels.items()
    )
    return "{" + ",".join(quoted) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
