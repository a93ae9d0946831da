"""``nsq to-http``: topics to HTTP endpoints, each message finished when one has accepted it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.params import ChannelName, Seconds
from nsqtools.cli.parsing.binding import From, OptionSet, opt
from nsqtools.cli.running.forwarding import Forwarding, run_forwarder
from nsqtools.cli.running.runtime import Session
from nsqtools.client.connection_settings import read_secret
from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import Renewed
from nsqtools.forward import BatchForm, EndpointMode, Redirects
from nsqtools.records.template import compile_template

if TYPE_CHECKING:
    from nsqtools.forward.http_requests import RequestSecrets, RequestSettings

REQUESTS = "Requests"  # headings of the help page
ENDPOINTS = "Endpoints"
OCTETS = "application/octet-stream"


class RequestOptions(OptionSet):
    """What requests look like. Raises `ConfigurationError`."""

    content_type: str | None = opt("TYPE", "Content-Type of a POST.", REQUESTS, show_default=OCTETS)
    header: list[str] | None = opt(
        "NAME: TEMPLATE", "A header, its value a template ('X-Id: {id}').", REQUESTS
    )
    metadata: bool = opt(
        "--metadata/--no-metadata",
        "Send Idempotency-Key and X-Nsq-Topic, -Message-Id, -Attempts, -Timestamp.",
        REQUESTS,
        True,
    )
    basic_auth_file: Path | None = opt("FILE", "File with USER:PASSWORD.", REQUESTS)
    bearer_token_file: Path | None = opt("FILE", "File with a bearer token.", REQUESTS)
    sign_key_file: Path | None = opt(
        "FILE", "File with a key: sign requests as Standard Webhooks (HMAC-SHA256).", REQUESTS
    )
    batch: int = opt("N", "Send up to N messages in one POST.", REQUESTS, 1, min=1, max=10_000)
    batch_bytes: int = opt("SIZE", "Send up to SIZE in one POST.", REQUESTS, "1MiB")
    batch_format: BatchForm = opt(
        "", "A batch is a line for each message, or a JSON array.", REQUESTS, BatchForm.NDJSON
    )
    linger: Seconds = opt(
        "DURATION", "How long a message waits for others of its batch.", REQUESTS, "100ms"
    )

    def check(self) -> None:
        if self.basic_auth_file is not None and self.bearer_token_file is not None:
            raise ConfigurationError("give either --basic-auth-file or --bearer-token-file")

    def settings(self, *, is_get: bool) -> RequestSettings:
        """Return the settings of requests. Reads the files. Raises `ConfigurationError`."""
        from nsqtools import __version__
        from nsqtools.forward.http_requests import RequestSettings, parse_header

        form = self.batch_format if self.batch > 1 else None
        if is_get and form is not None:
            raise ConfigurationError("--batch is for --post")
        if is_get and self.content_type is not None:
            raise ConfigurationError("--content-type is for --post")
        usual = {BatchForm.JSON: "application/json", BatchForm.NDJSON: "application/x-ndjson"}
        given = (self.basic_auth_file, self.bearer_token_file, self.sign_key_file)
        files = [str(path) for path in given if path]
        return RequestSettings(
            is_get,
            self.content_type or (usual[form] if form else OCTETS),
            f"nsqtools/{__version__}",
            tuple(map(parse_header, self.header or ())),
            Renewed(files, lambda: _read_secrets(*given)) if files else None,
            self.metadata,
            form,
        )


def _read_secrets(basic: Path | None, bearer: Path | None, sign_key: Path | None) -> RequestSecrets:
    from nsqtools.forward.http_requests import RequestSecrets

    authorization = b""
    if basic is not None:
        authorization = b"Basic " + base64.b64encode(read_secret(basic).encode())
    if bearer is not None:
        authorization = b"Bearer " + read_secret(bearer).encode()
    if not authorization.isascii() or any(c < 32 for c in authorization):
        raise ConfigurationError(f"{bearer} is not one line of ASCII")
    key = read_secret(sign_key).encode() if sign_key is not None else b""
    if key.startswith(b"whsec_"):  # as Standard Webhooks writes keys
        try:
            key = base64.b64decode(key[6:], validate=True)
        except ValueError:
            raise ConfigurationError(f"the key in {sign_key} is not base64") from None
    return RequestSecrets(authorization, key)


Requests = Annotated[RequestOptions, From(RequestOptions)]


Key = Annotated[
    Callable[..., bytes] | None,
    opt(
        "--key TEMPLATE",
        "Template of the key for --mode hash ('{.user.id}').",
        ENDPOINTS,
        parser=compile_template,
    ),
]


def to_http(
    channel: ChannelName = "nsq_to_http",
    post: list[str] | None = opt(
        "URL", "POST bodies to this URL; its path may be a template ('/{topic}').", ENDPOINTS
    ),
    get: list[str] | None = opt(
        "URL", "GET this URL, a template ('http://h/?m={body:url}').", ENDPOINTS
    ),
    mode: EndpointMode = opt(
        "",
        "With several URLs: each in turn, by --key, the first that works, or all of them.",
        ENDPOINTS,
        EndpointMode.ROUND_ROBIN,
    ),
    key: Key = None,
    concurrency: int = opt("N", "Requests at a time.", ENDPOINTS, 100, min=1),
    http_client_connect_timeout: Seconds = opt(
        "DURATION", "How long to try to connect.", ENDPOINTS, "2s"
    ),
    http_client_request_timeout: Seconds = opt(
        "DURATION", "How long to wait for an answer.", ENDPOINTS, "20s"
    ),
    on_status: list[str] | None = opt(
        "STATUS=ACTION",
        "What an answer means: ok, retry, drop or dead-letter. 2xx is ok; 5xx, 401, 403, 404, 408, "
        "425, 429 retry; 3xx and other 4xx dead-letter.",
        ENDPOINTS,
    ),
    redirects: Redirects = opt(
        "",
        "Whether to follow redirects that keep method and body (307, 308).",
        ENDPOINTS,
        Redirects.REFUSE,
    ),
    private_addresses: bool = opt(
        "--private-addresses/--no-private-addresses",
        "Whether URLs may lead to private networks; redirects to other hosts never may.",
        ENDPOINTS,
        True,
    ),
    http_ca_file: Path | None = opt("FILE", "Certificates to trust, PEM.", ENDPOINTS),
    http_cert: Path | None = opt("FILE", "Client certificate, PEM.", ENDPOINTS),
    http_key: Path | None = opt("FILE", "Key of the client certificate, PEM.", ENDPOINTS),
    http_insecure: bool = opt("", "Do not verify the certificates of endpoints.", ENDPOINTS),
    *,
    requests: Requests,
    forwarding: Forwarding,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Send topics to HTTP endpoints, each message finished when one has accepted it.

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
    from nsqtools.forward.http_pool import HttpPool, HttpTls
    from nsqtools.forward.http_requests import Endpoint
    from nsqtools.forward.http_sink import HttpSettings, HttpSink, parse_policy

    if bool(post) == bool(get):
        raise ConfigurationError("give one or more --post, or one or more --get")
    endpoints = [Endpoint(url, allows_private=private_addresses) for url in post or get or ()]
    settings = HttpSettings(
        mode,
        key,
        concurrency,
        parse_policy(on_status or ()),
        redirects,
        requests.batch,
        requests.batch_bytes,
        requests.linger,
    )
    tls = None
    if redirects is Redirects.FOLLOW or any(each.origin.is_tls for each in endpoints):
        tls = HttpTls(http_ca_file, http_cert, http_key, is_insecure=http_insecure)
    sink = HttpSink(
        endpoints,
        requests.settings(is_get=bool(get)),
        settings,
        HttpPool(http_client_connect_timeout, http_client_request_timeout, tls),
    )
    source = forwarding.source(channel, connection)
    return run_forwarder(source, sink, forwarding.settings(source), forwarding, runtime)
