"""Run a Python function for each message, as a service: `nsq work` and `nsqtools.serve`.

    worker       consumes, calls the handler, answers, reports and reloads
    handler      the function: its import, its checks, and its import again after a change
    decoding     bodies as the type that the function is annotated with
    times        a histogram of handling times
    tracing      spans of OpenTelemetry, and their context in a JSON body

This module has only the enumeration of an option, so that the command line can import it at no
cost.
"""

from __future__ import annotations

from enum import Enum


class Decoding(Enum):
    """What the handler gets instead of the message."""

    json = "json"
    text = "text"
    bytes = "bytes"
