"""Encode metrics in the text format that Prometheus scrapes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Value = float | int | str
MetricSample = tuple[Mapping[str, str], Value] | tuple[Mapping[str, str], Value, str]
"""Labels, a value, and in a histogram the suffix of the name, such as ``_sum``."""


class Metric(NamedTuple):
    """``kind`` is ``gauge``, ``counter`` or ``histogram``."""

    name: str
    kind: str
    help: str
    samples: Iterable[MetricSample]


def metric_of(name: str, help: str, samples: Iterable[MetricSample]) -> Metric:
    """Return a metric; by convention, the name of a counter ends with ``_total``."""
    return Metric(name, "counter" if name.endswith("_total") else "gauge", help, samples)


def encode_metrics(metrics: Iterable[Metric]) -> str:
    """Return the page: each metric with its help and type, and a line for each sample."""
    return "\n".join(metric_lines(metrics)) + "\n"


def metric_lines(metrics: Iterable[Metric]) -> Iterator[str]:
    """Yield the lines of the page, so that a caller can encode a large page in steps."""
    for metric in metrics:
        yield f"# HELP {metric.name} {_escape(metric.help)}"
        yield f"# TYPE {metric.name} {metric.kind}"
        for labels, value, *suffix in metric.samples:
            yield f"{metric.name}{''.join(suffix)}{_labels(labels)} {value}"


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
