"""``nsq to-http``: topics to HTTP endpoints, each message finished when one has accepted it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.forwarding import Forwarding
from nsqtools.cli.options.http_requests import Requests
from nsqtools.cli.options.params import ChannelName, Seconds, duration_option
from nsqtools.cli.running.forwarding import run_forwarder
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import ConfigurationError
from nsqtools.forward import EndpointMode, Redirects
from nsqtools.records.template import compile_template

PANEL = "Endpoints"


def _option(name: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return Option(name, metavar=metavar, help=help, rich_help_panel=PANEL, **more)


Post = Annotated[
    list[str] | None,
    _option("--post", "POST bodies to this URL; its path may be a template ('/{topic}').", "URL"),
]
Get = Annotated[
    list[str] | None,
    _option("--get", "GET this URL, a template ('http://h/?m={body:url}').", "URL"),
]
Mode = Annotated[
    EndpointMode,
    _option(
        "--mode",
        "With several URLs: each in turn, the same for the same --key, the first that works, or "
        "every message to all.",
    ),
]
Key = Annotated[
    Callable[..., bytes] | None,
    _option(
        "--key", "What --mode hash goes by ('{.user.id}').", "TEMPLATE", parser=compile_template
    ),
]
Concurrency = Annotated[int, _option("--concurrency", "Requests at a time.", "N", min=1)]
ConnectTimeout = Annotated[
    Seconds,
    duration_option("--http-client-connect-timeout", "How long to try to connect.", panel=PANEL),
]
RequestTimeout = Annotated[
    Seconds,
    duration_option(
        "--http-client-request-timeout", "How long to wait for an answer.", panel=PANEL
    ),
]
OnStatus = Annotated[
    list[str] | None,
    _option(
        "--on-status",
        "What an answer means: ok, retry, drop or dead-letter. 2xx is ok; 5xx, 401, 403, 404, 408, "
        "425, 429 retry; 3xx and other 4xx dead-letter.",
        "STATUS=ACTION",
    ),
]
FollowRedirects = Annotated[
    Redirects,
    _option("--redirects", "Whether to follow redirects that keep method and body (307, 308)."),
]
PrivateAddresses = Annotated[
    bool,
    _option(
        "--private-addresses/--no-private-addresses",
        "Whether URLs may lead to private networks; redirects to another host never may.",
    ),
]
CAFile = Annotated[Path | None, _option("--http-ca-file", "Certificates to trust, PEM.", "FILE")]
Cert = Annotated[Path | None, _option("--http-cert", "Client certificate, PEM.", "FILE")]
ClientKey = Annotated[
    Path | None, _option("--http-key", "Key of the client certificate, PEM.", "FILE")
]
Insecure = Annotated[
    bool, _option("--http-insecure", "Do not verify the certificates of endpoints.")
]


def to_http(
    channel: ChannelName = "nsq_to_http",
    post: Post = None,
    get: Get = None,
    mode: Mode = EndpointMode.ROUND_ROBIN,
    key: Key = None,
    concurrency: Concurrency = 100,
    http_client_connect_timeout: ConnectTimeout = "2s",  # type: ignore[assignment]
    http_client_request_timeout: RequestTimeout = "20s",  # type: ignore[assignment]
    on_status: OnStatus = None,
    redirects: FollowRedirects = Redirects.REFUSE,
    private_addresses: PrivateAddresses = True,
    http_ca_file: CAFile = None,
    http_cert: Cert = None,
    http_key: ClientKey = None,
    http_insecure: Insecure = False,
    *,
    requests: Requests,
    forwarding: Forwarding,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Send topics to HTTP endpoints, each message finished when an endpoint has accepted it.

    Runs until it is stopped or a limit is reached. A message is finished when the answer is 2xx.
    One that fails goes to the next URL first, then back to its queue, after the delay that
    Retry-After asks for or one that doubles. While no endpoint works messages are held, and their
    queue grows. A message can arrive twice: its Idempotency-Key is the same then.

    The exit status is 6 when there are dead letters or dropped messages.

    Examples:
        nsq to-http -t clicks --post http://127.0.0.1:8080/hook
        nsq to-http -t clicks --post https://a/hook --post https://b/hook --mode failover
        nsq to-http -t log --batch 500 --linger 1s --batch-format ndjson --post http://es:9200/_bulk
        nsq to-http -t orders --sign-key-file key --dead-letter-file dead.jsonl --max-attempts 20 \\
            --header 'X-Customer: {.customer.id}' --post https://example.com/webhook
    """
    from nsqtools.forward.forwarder import THROUGHPUT, ForwardSettings
    from nsqtools.forward.http_pool import HttpPool, HttpTls
    from nsqtools.forward.http_requests import Endpoint
    from nsqtools.forward.http_sink import HttpSettings, HttpSink, parse_policy
    from nsqtools.forward.topic_sources import SourceSettings

    if bool(post) == bool(get):
        raise ConfigurationError("give one or more --post, or one or more --get")
    endpoints = [Endpoint(url, allows_private=private_addresses) for url in post or get or ()]
    settings = HttpSettings(
        mode,
        key,
        concurrency,
        parse_policy(on_status or ()),
        redirects,
        requests.batch_count,
        requests.batch_bytes,
        requests.linger_s,
    )
    tls = None
    if redirects is Redirects.FOLLOW or any(each.origin.is_tls for each in endpoints):
        tls = HttpTls(http_ca_file, http_cert, http_key, is_insecure=http_insecure)
    options = connection.client_options(**THROUGHPUT)
    sink = HttpSink(
        endpoints,
        requests.settings(is_get=bool(get)),
        settings,
        HttpPool(http_client_connect_timeout, http_client_request_timeout, tls),
    )
    source = SourceSettings(
        forwarding.topics,
        channel,
        connection,
        options,
        forwarding.pattern,
        forwarding.refresh_s,
    )
    forward = ForwardSettings(
        forwarding.keep,
        forwarding.pick,
        rate=forwarding.rate,
        max_attempts=forwarding.max_attempts,
        drain_s=options.drain_timeout_s,
    )
    return run_forwarder(source, sink, forward, forwarding, runtime)
