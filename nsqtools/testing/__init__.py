"""For the tests of programs that use nsqtools: messages without a server, and servers.

    fakes               messages that record how they were answered, and producers that record what
                        was published or raise the error given; they need no server
    pytest_plugin       fixtures: an nsqd and an nsqlookupd for the run, a topic for each test

pytest finds the plugin by itself where nsqtools is installed. See nsq-python(7).

The names are loaded when they are asked for, because every run of pytest imports this package.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nsqtools.testing.fakes import (
        AsyncFakeProducer,
        FakeMessage,
        FakeProducer,
        Published,
        fake_batch,
        fake_message,
    )

__all__ = [
    "AsyncFakeProducer",
    "FakeMessage",
    "FakeProducer",
    "Published",
    "fake_batch",
    "fake_message",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nsqtools.testing import fakes

    public: object = getattr(fakes, name)
    return public
