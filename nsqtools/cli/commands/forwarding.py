"""``nsq to-nsq`` and ``nsq to-http``: topics to another cluster or to HTTP endpoints.

Both run a forwarder: its options, signals, progress, metrics, health, exit status are here once. A
message is finished when it is confirmed there.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.cli.options.connection import DESTINATION, ConsumerConnection, Destination
from nsqtools.cli.options.params import SAFETY, SELECTION, ChannelName, parse_interval
from nsqtools.cli.options.printing import MessageFilter, Pick
from nsqtools.cli.options.publishing import DELIVERY, Rate
from nsqtools.cli.parsing.binding import OptionSet, heading, opt
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.consuming import Consuming, look_before
from nsqtools.cli.running.runtime import ExitStatus, Session, status_of_work
from nsqtools.client.connection_settings import read_secret
from nsqtools.errors import ConfigurationError, ConnectionFailed
from nsqtools.files.opening import Renewed
from nsqtools.forward import BatchForm, EndpointMode, ForwardMode, Redirects
from nsqtools.records.template import compile_template, has_fields

if TYPE_CHECKING:
    from nsqtools.client.options import ClientOptions
    from nsqtools.forward.dispatcher import DeadLetterBox
    from nsqtools.forward.forwarder import ForwardSettings
    from nsqtools.forward.http_requests import RequestBuilder, RequestSecrets
    from nsqtools.forward.parcel import ForwardTotals, Sink


class ForwardOptions(Consuming):
    """What the options say. Raises `ConfigurationError` when they contradict each other."""

    keep: MessageFilter
    pick: Pick = None
    rate: Rate = 0.0
    max_attempts: int = opt(
        "N", "Give up after N attempts, outages not counted; 0: never.", DELIVERY, 0, min=0
    )
    dead_letter_topic: str | None = opt(
        "TOPIC", "Publish what cannot be delivered to this topic, on the same nsqd.", DELIVERY
    )
    dead_letter_file: Path | None = opt(
        "FILE", "Append what cannot be delivered to this file, for nsq redrive.", DELIVERY
    )
    connection: ConsumerConnection
    runtime: Session

    def check(self) -> None:
        super().check()
        if self.dead_letter_topic is not None and self.dead_letter_file is not None:
            raise ConfigurationError("give either --dead-letter-topic or --dead-letter-file")
        if self.max_attempts:
            self.need_letters("--max-attempts")
        if self.dead_letter_topic in self.topics:
            raise ConfigurationError(
                f"dead letters cannot go to {self.dead_letter_topic}, which is forwarded"
            )

    def need_letters(self, option: str) -> None:
        """Raise `ConfigurationError` when there is no place for what an option gives up."""
        if self.dead_letter_topic is None and self.dead_letter_file is None:
            raise ConfigurationError(
                f"{option} needs a place for what is given up",
                hint="Give --dead-letter-topic or --dead-letter-file.",
            )

    def settings(
        self,
        channel: str,
        usual: dict[str, Any] | None = None,
        *,
        check: Callable[[str], None] = lambda topic: None,
        **more: Any,
    ) -> ForwardSettings:
        """Where messages come from, and what happens to them.

        ``usual`` are client options where the user gives none, ``more`` fields of the command, and
        ``check`` is as for `ConsumedTopics`.
        """
        from nsqtools.forward.forwarder import THROUGHPUT, ForwardSettings

        own = {name: getattr(self, name) for name in ("keep", "pick", "rate", "max_attempts")}
        letters = filter(None, [self.dead_letter_topic])  # which would feed themselves
        topics = self.consumed(self.connection, check=check, leave_out=letters)
        options = self.connection.client_options(**{**THROUGHPUT, **(usual or {})})
        return ForwardSettings(topics, channel, options, **own, **more)

    def run(
        self, settings: ForwardSettings, sink: Sink, addresses: Sequence[str] = (), hint: str = ""
    ) -> int:
        """Forward until it is stopped or a limit is reached; report, and return the exit status.

        One of the ``addresses``, each HOST:PORT, has to take a connection before that; ``hint``
        says what to do if none does, where the usual hint is wrong because they are not nsqd.
        """
        from nsqtools.client.connection import require_one
        from nsqtools.files.opening import allow_many
        from nsqtools.forward.forwarder import Forwarder

        allow_many()
        runtime, connection, channel = self.runtime, self.connection, settings.channel
        look_before(self.topics, channel, connection, runtime, create=self.create, force=True)
        try:
            require_one(addresses, settings.options.dial_timeout_s)
        except ConnectionFailed as error:
            error.hint = hint or error.hint
            raise
        forwarder = Forwarder(
            settings,
            sink,
            dead_letters=self.dead_letters(settings.options),
            limits=self.limits.run_limits(),
            on_tick=lambda: watched.tick(
                lambda: f"{counters.totals.delivered:,} messages delivered"
            ),
        )
        counters, dispatcher = forwarder.counters, forwarder.dispatcher
        with self.watched(
            runtime,
            forwarder.stop,
            metrics=lambda: counters.metrics(dispatcher.held, dispatcher.is_failing),
            health=lambda: (not dispatcher.is_failing, dispatcher.last_error or "forwarding"),
            queue=(connection, channel),
            done=lambda: counters.totals.received,
        ) as watched:
            try:
                forwarder.run()
            finally:
                watched.progress.clear()
                totals = counters.totals
                if self.json:
                    write_json(runtime, asdict(totals))
                left = f"; {forwarder.left} of them did not come again" if forwarder.left else ""
                runtime.info(f"nsq: {summary(totals)}{left}")
        if forwarder.falls_short:
            return watched.signals.status(otherwise=ExitStatus.LIMIT_NOT_REACHED)
        is_whole = not (totals.dead_lettered or totals.dropped or forwarder.left)
        status = status_of_work(is_whole=is_whole, is_anything_done=True)
        return watched.signals.status(otherwise=status)

    def dead_letters(self, options: ClientOptions) -> DeadLetterBox | None:
        """Where what cannot be delivered goes. Raises `OutputError` and `ConfigurationError`."""
        from nsqtools.forward.dispatcher import DeadLetterFile, DeadLetterTopic

        if self.dead_letter_file is not None:
            return DeadLetterFile(self.dead_letter_file)
        topic = self.dead_letter_topic
        return None if topic is None else DeadLetterTopic(topic, options)


def summary(totals: ForwardTotals) -> str:
    """The counts in a line: what was delivered, and what else happened where it did."""
    line = f"{totals.delivered} delivered"
    for name, words in (
        ("filtered", "filtered out"),
        ("unjudged", "not judged"),
        ("dead_lettered", "dead letters"),
        ("dropped", "dropped"),
        ("requeued", "requeued"),
        ("repeated", "sent again and perhaps doubled"),
    ):
        if count := getattr(totals, name):
            line += f", {count} {words}"
    return line


@heading(DESTINATION)
def to_nsq(
    channel: ChannelName = "nsq_to_nsq",
    destination_topic: str | None = opt(
        "TOPIC", "Publish everything to this topic, not each under its name."
    ),
    map: list[str] | None = opt(
        "REGEX=NAME", r"Rename topics ('eu\.(.*)=\1'); the first match counts."
    ),
    mode: ForwardMode = opt(
        "", "Several: in turn, by --key, or the first that works.", default=ForwardMode.ROUND_ROBIN
    ),
    key: Callable[..., bytes] | None = opt(
        "TEMPLATE", "The key of --mode hash ('{.user.id}').", parser=compile_template
    ),
    require_json_field: str | None = opt(
        "FIELD", "Keep messages that are JSON objects with this field.", SELECTION
    ),
    require_json_value: str | None = opt(
        "VALUE", "Keep messages whose --require-json-field is this text or number.", SELECTION
    ),
    whitelist_json_field: list[str] | None = opt(
        "FIELD", "Publish only these fields of JSON objects, their values unchanged.", SELECTION
    ),
    loop_guard: bool = opt(
        "--loop-guard/--no-loop-guard",
        "Refuse topics whose messages would come back.",
        SAFETY,
        True,
    ),
    *,
    forwarding: ForwardOptions,
    destination: Destination,
) -> int:
    """Forward topics to another nsqd or cluster, each message finished once it is there.

    Runs until it is stopped or a limit is reached. A message is finished when the destination has
    confirmed it, and one that a filter leaves out at once; while no destination works messages are
    held, and their queue grows. Without any at the start it ends. Bodies are
    forwarded byte for byte unless --pick or --whitelist-json-field changes them. A body to which a
    filter or --pick cannot be applied, because it is not JSON, makes a dead letter, or is requeued.
    When a connection breaks before the answer, messages are sent again and may be there twice; how
    many is counted.

    The exit status is 6 when there are dead letters, and when a limit ended it while messages that
    failed were back in their queue.

    Examples:
        nsq to-nsq -t clicks --destination-nsqd-tcp-address mirror:4150
        nsq to-nsq --topic-pattern '^eu[.]' --map 'eu[.](.*)=\\1' \\
            --destination-nsqd-tcp-address b:4150
        nsq to-nsq -t log --where '.status >= 500' --destination-topic errors \\
            --destination-nsqd-tcp-address b:4150 --dead-letter-file dead.jsonl --max-attempts 10
        nsq to-nsq -t clicks --until-empty --destination-lookupd-http-address lookup:4161
    """
    from nsqtools.forward.nsq_sink import WINDOW_BYTES, LoopGuard, NsqSink, renamer
    from nsqtools.records.filters import json_filters

    rename = renamer(destination_topic, map or ())
    for topic in forwarding.topics:
        rename(topic)  # a name that is not one is refused before any daemon is asked
    sink = NsqSink(destination, mode=mode, key=key)
    keep, pick = json_filters(
        forwarding.keep,
        forwarding.pick,
        required=require_json_field,
        value=require_json_value,
        whitelist=whitelist_json_field or (),
    )
    there = replace(destination, nsqd_tcp_addresses=sink.nsqds)
    guard = LoopGuard(forwarding.connection, there, rename)
    check = guard.check if loop_guard else lambda topic: None
    settings = forwarding.settings(channel, check=check, user_agent=guard.user_agent, rename=rename)
    settings = settings._replace(keep=keep, pick=pick, window_bytes=WINDOW_BYTES)
    return forwarding.run(settings, sink, sink.nsqds)


OCTETS = "application/octet-stream"


class RequestOptions(OptionSet):
    """What requests look like. Raises `ConfigurationError`."""

    panel = "Requests"
    content_type: str | None = opt("TYPE", "Content-Type of a POST.", show_default=OCTETS)
    header: list[str] | None = opt(
        "NAME: TEMPLATE", "A header, its value a template ('X-Id: {id}')."
    )
    metadata: bool = opt(
        "--metadata/--no-metadata",
        "Send Idempotency-Key and X-Nsq-Topic, -Message-Id, -Attempts, -Timestamp.",
        default=True,
    )
    basic_auth_file: Path | None = opt("FILE", "File with USER:PASSWORD.")
    bearer_token_file: Path | None = opt("FILE", "File with a bearer token.")
    sign_key_file: Path | None = opt(
        "FILE", "File with a key: sign requests as Standard Webhooks (HMAC-SHA256)."
    )
    batch: int = opt(
        "N",
        "Send up to N messages that share URL and headers in a POST.",
        default=1,
        min=1,
        max=10_000,
    )
    batch_bytes: int = opt("SIZE", "Send up to SIZE in one POST.", default="1MiB")
    batch_format: BatchForm = opt(
        "", "A batch is a line for each message, or a JSON array.", default=BatchForm.NDJSON
    )
    linger: float = opt(
        "DURATION", "How long a message waits for others of its batch.", default="100ms"
    )

    def check(self) -> None:
        if self.basic_auth_file is not None and self.bearer_token_file is not None:
            raise ConfigurationError("give either --basic-auth-file or --bearer-token-file")

    def builder(self, *, is_get: bool) -> RequestBuilder:
        """Return what makes requests. Reads the files. Raises `ConfigurationError`."""
        from nsqtools.forward.http_requests import RequestBuilder, parse_header

        form = self.batch_format if self.batch > 1 else None
        if is_get and form is not None:
            raise ConfigurationError("--batch is for --post")
        if is_get and self.content_type is not None:
            raise ConfigurationError("--content-type is for --post")
        if is_get and self.sign_key_file is not None:
            raise ConfigurationError("--sign-key-file is for --post: the body is what is signed")
        usual: dict[BatchForm | None, str]
        usual = {BatchForm.JSON: "application/json", BatchForm.NDJSON: "application/x-ndjson"}
        given = (self.basic_auth_file, self.bearer_token_file, self.sign_key_file)
        files = [str(path) for path in given if path]
        return RequestBuilder(
            content_type=None if is_get else self.content_type or usual.get(form, OCTETS),
            headers=list(map(parse_header, self.header or ())),
            secrets=Renewed(files, lambda: _read_secrets(*given)) if files else None,
            has_metadata=self.metadata,
            batch=form,
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


@heading("Endpoints")
def to_http(
    channel: ChannelName = "nsq_to_http",
    post: list[str] | None = opt(
        "URL", "POST bodies to this URL; its path may be a template ('/{topic}/{.user}')."
    ),
    get: list[str] | None = opt("URL", "GET this URL, a template ('http://h/?m={body:url}')."),
    mode: EndpointMode = opt(
        "",
        "With several URLs: each in turn, by --key, the first that works, or all of them.",
        default=EndpointMode.ROUND_ROBIN,
    ),
    key: Callable[..., bytes] | None = opt(
        "TEMPLATE", "The key of --mode hash ('{.user.id}').", parser=compile_template
    ),
    concurrency: int = opt("N", "Requests at a time.", default=100, min=1),
    http_client_connect_timeout: float = opt(
        "DURATION", "How long to try to connect.", default="2s", parser=parse_interval
    ),
    http_client_request_timeout: float = opt(
        "DURATION", "How long to wait for an answer.", default="20s", parser=parse_interval
    ),
    on_status: list[str] | None = opt(
        "STATUS=ACTION",
        "What an answer means: ok, retry, drop or dead-letter. 2xx is ok; 5xx, 401, 403, 404, 408, "
        "425, 429 retry; 3xx and other 4xx dead-letter.",
    ),
    redirects: Redirects = opt(
        "", "Follow redirects that keep method and body (307, 308).", default=Redirects.REFUSE
    ),
    private_addresses: bool = opt(
        "--private-addresses/--no-private-addresses",
        "Whether URLs may lead to private networks; redirects to other hosts never may.",
        default=True,
    ),
    http_ca_file: Path | None = opt("FILE", "Certificates to trust, PEM."),
    http_cert: Path | None = opt("FILE", "Client certificate, PEM."),
    http_key: Path | None = opt("FILE", "Key of the client certificate, PEM."),
    http_insecure: bool = opt("", "Do not verify the certificates of endpoints."),
    *,
    requests: RequestOptions,
    forwarding: ForwardOptions,
) -> int:
    """Send topics to HTTP endpoints, each message finished when one has accepted it.

    Runs until it is stopped or a limit is reached. A message is finished when the answer is 2xx,
    and one that a filter leaves out at once. Without any endpoint at the start it ends.
    In a URL fields are percent-encoded; {body:raw} and {.path:raw} are as they are.
    One that fails goes to the next URL first, then back to its queue, after the delay that
    Retry-After asks for or one that doubles. While no endpoint works messages are held, and their
    queue grows. A message can arrive twice: its Idempotency-Key is the same then.

    With --mode all a message is finished when every URL has it. While one of them does not work
    messages are held, for the others too: what must not wait has a command and channel of its own.

    --pick changes the body, and what the URL is made of; --header and --key see the message as it
    came. A body to which --where or --pick cannot be applied, because it is not JSON, makes a dead
    letter, or is requeued.

    The exit status is 6 when there are dead letters or dropped messages, and when a limit ended it
    while messages that failed were back in their queue.

    Examples:
        nsq to-http -t clicks --post http://127.0.0.1:8080/hook
        nsq to-http -t clicks --post https://a/hook --post https://b/hook --mode failover
        nsq to-http -t log --batch 500 --linger 1s --batch-format ndjson --post http://logs:8080/bulk
        nsq to-http -t orders --sign-key-file key --dead-letter-file dead.jsonl --max-attempts 20 \\
            --header 'X-Customer: {.customer.id}' --post https://example.com/webhook
    """
    from nsqtools.forward.http_pool import HttpPool, HttpTls
    from nsqtools.forward.http_requests import Endpoint
    from nsqtools.forward.http_sink import HttpSettings, HttpSink, parse_policy

    if bool(post) == bool(get):
        raise ConfigurationError("give one or more --post, or one or more --get")
    make = partial(Endpoint, allows_private=private_addresses, is_get=bool(get))
    endpoints = list(map(make, post or get or ()))
    for endpoint in endpoints if get and not any(map(has_fields, requests.header or ())) else ():
        if not endpoint.has_fields:  # each message would be finished by the same request
            raise ConfigurationError(
                f"--get {endpoint.url} has no field of the message",
                hint="Write {body:url} where its body goes, as in 'http://host/?m={body:url}'.",
            )
    batches = requests.batch, requests.batch_bytes, requests.linger
    policy = parse_policy(on_status or ())
    settings = HttpSettings(mode, key, concurrency, policy, redirects, *batches)
    tls = None
    if redirects is Redirects.FOLLOW or any(each.origin[0] == "https" for each in endpoints):
        tls = HttpTls(http_ca_file, http_cert, http_key, is_insecure=http_insecure)
    sink = HttpSink(
        endpoints,
        requests.builder(is_get=bool(get)),
        settings,
        HttpPool(http_client_connect_timeout, http_client_request_timeout, tls),
    )
    there = [each.name for each in endpoints]
    hint = "Check the URL, and that a server listens there."
    return forwarding.run(forwarding.settings(channel, batch=requests.batch), sink, there, hint)
