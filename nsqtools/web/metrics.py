"""/metrics of the whole cluster: every topic and channel of all nsqd, in one scrape.

It shows the last sample, which is at most an interval old (``nsq_sample_age_seconds``): however
many scrape, nsqd is asked once. An nsqd that does not answer has ``nsq_up`` 0 and nothing else, and
is no reason for a scrape to fail.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from nsqtools.cluster.prometheus_metrics import node_metrics, sample_metrics
from nsqtools.records.prometheus import Metric, encode_metrics
from nsqtools.web.context import WebContext

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_SAMPLE_S = 10.0


def routes(context: WebContext) -> list[BaseRoute]:
    """Return the route of /metrics."""

    def metrics(_: Request) -> Response:
        # a hostile nsqd may send what is not text
        text = metrics_text(context).encode("utf-8", "backslashreplace")
        return Response(text, media_type=CONTENT_TYPE)

    return [Route("/metrics", metrics)]


def metrics_text(context: WebContext) -> str:
    """Return the page; waits for the first sample."""
    watcher = context.watcher
    sample = watcher.latest or watcher.wait_newer(0, FIRST_SAMPLE_S)
    own = [
        Metric(
            "nsq_scrape_duration_seconds",
            "gauge",
            "How long all nsqd took to answer.",
            [({}, f"{watcher.took_s:.6g}")],
        ),
        Metric(
            "nsq_sample_interval_seconds",
            "gauge",
            "Time between two samples.",
            [({}, f"{watcher.interval_s:g}")],
        ),
    ]
    if sample is None:
        return encode_metrics(own)
    age_s = max(0.0, time.time() - sample.time_ns / 1e9)
    own.append(
        Metric(
            "nsq_sample_age_seconds", "gauge", "How old these numbers are.", [({}, f"{age_s:.3f}")]
        )
    )
    lookupds = list(context.cluster.lookupds)
    return encode_metrics([*sample_metrics(sample, lookupds), *node_metrics(sample), *own])
