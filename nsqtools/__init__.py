"""nsqtools: one `nsq` command and a synchronous client for the NSQ message queue.

The errors are imported immediately. The other public names are imported on first use, so that
importing the package is cheap.
"""

from __future__ import annotations

import os

if not hasattr(os, "register_at_fork"):  # before an import that would fail less clearly
    raise ImportError("nsqtools needs a POSIX system (Linux, macOS, BSD); on Windows, use WSL")

from nsqtools import errors
from nsqtools.errors import *  # noqa: F403

__version__ = "0.4.0"

TYPE_CHECKING = False  # importing typing would double the time of nsq --version
if TYPE_CHECKING:
    from nsqtools.client.consumer import Consumer, ConsumerHealth, OverdueMessage
    from nsqtools.client.handling import GiveUp, RequeueWithoutBackoff
    from nsqtools.client.message import Batch, Message
    from nsqtools.client.options import ClientOptions
    from nsqtools.client.producer import Producer, ProducerHealth
    from nsqtools.client.publication import Publication
    from nsqtools.forward.forwarder import Forwarder, forward_to
    from nsqtools.forward.parcel import Fate, Outcome, Parcel, Sink, ThreadedSink
    from nsqtools.work.tracing import traced_publish
    from nsqtools.work.worker import serve

__all__ = [
    "Batch",
    "ClientOptions",
    "Consumer",
    "ConsumerHealth",
    "Fate",
    "Forwarder",
    "GiveUp",
    "Message",
    "Outcome",
    "OverdueMessage",
    "Parcel",
    "Producer",
    "ProducerHealth",
    "Publication",
    "RequeueWithoutBackoff",
    "Sink",
    "ThreadedSink",
    "__version__",
    "forward_to",
    "serve",
    "traced_publish",
]
__all__ += errors.__all__

_HOMES = {
    "Batch": "client.message",
    "ClientOptions": "client.options",
    "Consumer": "client.consumer",
    "ConsumerHealth": "client.consumer",
    "Fate": "forward.parcel",
    "Forwarder": "forward.forwarder",
    "GiveUp": "client.handling",
    "Message": "client.message",
    "Outcome": "forward.parcel",
    "OverdueMessage": "client.consumer",
    "Parcel": "forward.parcel",
    "Producer": "client.producer",
    "ProducerHealth": "client.producer",
    "Publication": "client.publication",
    "RequeueWithoutBackoff": "client.handling",
    "Sink": "forward.parcel",
    "ThreadedSink": "forward.parcel",
    "forward_to": "forward.forwarder",
    "serve": "work.worker",
    "traced_publish": "work.tracing",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        public: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except AttributeError as error:  # "cannot import name" would hide it
        raise ImportError(f"cannot import nsqtools.{_HOMES[name]}: {error}") from error
    return public


def __dir__() -> list[str]:
    return sorted(__all__)
