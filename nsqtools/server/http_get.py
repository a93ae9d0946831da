"""HTTP requests of a daemon, to auth servers about a client and to nsqlookupd about a topic.

Trap: a client of httpx logs each URL with the program's logging, and the URL of an auth request
contains the secret. The transport of httpx, which is used here, does not log.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from ssl import SSLContext

import httpx

from nsqtools.errors import ProtocolError
from nsqtools.server.daemon_log import NSQ_VERSION
from nsqtools.server.options import NsqdOptions

_MAX_ANSWER_BYTES = 1 << 20  # a bound on the memory that another server can make nsqd use
_HEADERS = {"Accept": "application/vnd.nsq; version=1.0", "Accept-Encoding": "identity"}
_HEADERS["User-Agent"] = f"nsqd/{NSQ_VERSION}"


async def http_get(url: str, options: NsqdOptions, verify: SSLContext | bool) -> bytes:
    """Return the body of an answer with status 200.

    The options have the timeouts, where 0 means no limit.

    Raises `ProtocolError`, ``httpx.HTTPError``, ``httpx.InvalidURL`` and ``TimeoutError``.
    """
    timeout = {"connect": options.http_client_connect_timeout or None}
    request = httpx.Request("GET", url, headers=_HEADERS, extensions={"timeout": timeout})
    if request.url.userinfo:
        next(httpx.BasicAuth(request.url.username, request.url.password).auth_flow(request))
    body = bytearray()
    async with (
        asyncio.timeout(options.http_client_request_timeout or None),
        httpx.AsyncHTTPTransport(verify=verify, trust_env=False) as transport,
        aclosing(await transport.handle_async_request(request)) as response,
    ):
        if response.status_code != 200:
            raise ProtocolError(f"got response {response.status_code}")
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > _MAX_ANSWER_BYTES:
                raise ProtocolError(f"the answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(body)
