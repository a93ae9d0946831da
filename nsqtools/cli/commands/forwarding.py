"""``nsq to-nsq``, ``to-http`` and ``to-exec``: topics to another cluster, endpoints or commands."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.options.connection import DESTINATION, Destination
from nsqtools.cli.options.params import SAFETY, SELECTION, ChannelName, parse_positive_duration
from nsqtools.cli.options.publishing import DELIVERY
from nsqtools.cli.parsing.binding import OptionSet, in_panel, opt
from nsqtools.cli.render.outcomes import CLEAR_LINE
from nsqtools.cli.running.forward_options import ForwardOptions
from nsqtools.cli.running.runtime import Runtime, write_whole
from nsqtools.client.connection_settings import read_secret
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.files.opening import ReloadedValue
from nsqtools.forward import BatchForm, EndpointMode, ForwardMode, Redirects
from nsqtools.records.template import compile_template, has_fields

if TYPE_CHECKING:
    from nsqtools.forward.exec_sink import ExecSettings, Write
    from nsqtools.forward.http_requests import RequestBuilder, RequestSecrets


@in_panel(DESTINATION)
def to_nsq(
    channel: ChannelName = "nsq_to_nsq",
    destination_topic: str | None = opt(
        "TOPIC", "Publish everything to this topic, not each under its name."
    ),
    map: list[str] | None = opt(
        "REGEX=NAME", r"Rename topics ('eu\.(.*)=\1'); the first match counts."
    ),
    mode: ForwardMode = opt(
        "",
        "With several nsqd: in rotation, by --key, or the first that works.",
        default=ForwardMode.ROUND_ROBIN,
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
        "Refuse topics whose messages would return to them.",
        SAFETY,
        True,
    ),
    *,
    forwarding: ForwardOptions,
    destination: Destination,
) -> int:
    """Forward topics to another nsqd or cluster, finishing each message after it is confirmed.

    Runs until it is stopped or a limit is reached. A message is finished when the destination
    confirms it or a filter excludes it. While no destination works, messages are held and their
    queue grows; if none works at the start, the command fails. Bodies are forwarded byte for byte
    unless --pick or --whitelist-json-field changes them. A body that is not JSON where a filter or
    --pick needs JSON becomes a dead letter, or is requeued. If a connection breaks before the
    answer, messages are sent again, may arrive twice, and are counted.

    The exit status is 6 if there are dead letters, or if a limit ended the run while failed
    messages were back in their queue.

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
        rename(topic)  # raises for an invalid name before any daemon is asked
    sink = NsqSink(destination, mode=mode, key=key)
    keep, pick = json_filters(
        forwarding.keep,
        forwarding.pick,
        required=require_json_field,
        value=require_json_value,
        whitelist=whitelist_json_field or (),
    )
    guard = LoopGuard(
        forwarding.connection, replace(destination, nsqd_tcp_addresses=sink.nsqds), rename
    )
    check = guard.check if loop_guard else rename  # both raise for an invalid name
    settings = forwarding.settings(channel, check=check)._replace(
        keep=keep,
        pick=pick,
        rename=rename,
        user_agent=guard.user_agent,
        window_bytes=WINDOW_BYTES,
    )
    return forwarding.run(settings, sink, sink.nsqds)


OCTETS = "application/octet-stream"
CONTENT_TYPES = {BatchForm.JSON: "application/json", BatchForm.NDJSON: "application/x-ndjson"}


BATCH_BYTES = 1 << 20
LINGER_S = 0.1


def check_for_batch(batch: int, options: Mapping[str, bool]) -> None:
    """Raise `ConfigurationError` if one of the ``options`` is set without ``--batch``."""
    for name, is_set in options.items():
        if is_set and batch == 1:
            hint = "Give --batch N, with N above 1."
            raise ConfigurationError(f"{name} is for --batch", hint=hint)


class RequestOptions(OptionSet):
    """Options of requests. Raises `ConfigurationError` if they contradict each other."""

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
    batch_bytes: int | None = opt("SIZE", "Send up to SIZE in one POST.", show_default="1MiB")
    batch_format: BatchForm = opt(
        "", "Format of a batch: one line per message, or a JSON array.", default=BatchForm.NDJSON
    )
    linger: float | None = opt(
        "DURATION", "Longest wait of a message for its batch to fill.", show_default="100ms"
    )

    def check(self) -> None:
        if self.basic_auth_file is not None and self.bearer_token_file is not None:
            raise ConfigurationError("give either --basic-auth-file or --bearer-token-file")
        options = {
            "--batch-format json": self.batch_format is BatchForm.JSON,
            "--batch-bytes": self.batch_bytes is not None,
            "--linger": self.linger is not None,
        }
        check_for_batch(self.batch, options)

    def builder(self, *, is_get: bool) -> RequestBuilder:
        """Return the builder of requests. Reads the files. Raises `ConfigurationError`."""
        from nsqtools.forward.http_requests import RequestBuilder, parse_header

        form = self.batch_format if self.batch > 1 else None
        if is_get and form is not None:
            raise ConfigurationError("--batch is for --post")
        if is_get and self.content_type is not None:
            raise ConfigurationError("--content-type is for --post")
        if is_get and self.sign_key_file is not None:
            raise ConfigurationError("--sign-key-file is for --post: the signature covers the body")
        default = OCTETS if form is None else CONTENT_TYPES[form]
        secrets = (self.basic_auth_file, self.bearer_token_file, self.sign_key_file)
        files = [str(path) for path in secrets if path]
        return RequestBuilder(
            content_type=None if is_get else self.content_type or default,
            headers=list(map(parse_header, self.header or ())),
            secrets=ReloadedValue(files, self._read_secrets) if files else None,
            has_metadata=self.metadata,
            batch=form,
        )

    def _read_secrets(self) -> RequestSecrets:
        from nsqtools.forward.http_requests import RequestSecrets

        authorization = b""
        if self.basic_auth_file is not None:
            authorization = b"Basic " + base64.b64encode(read_secret(self.basic_auth_file).encode())
        if self.bearer_token_file is not None:
            authorization = b"Bearer " + read_secret(self.bearer_token_file).encode()
        if not authorization.isascii() or any(c < 32 for c in authorization):
            raise ConfigurationError(f"{self.bearer_token_file} is not one line of ASCII")
        key = read_secret(self.sign_key_file).encode() if self.sign_key_file is not None else b""
        if key.startswith(b"whsec_"):  # the format of keys in Standard Webhooks
            try:
                key = base64.b64decode(key[6:], validate=True)
            except ValueError:
                raise ConfigurationError(f"the key in {self.sign_key_file} is not base64") from None
        return RequestSecrets(authorization, key)


@in_panel("Endpoints")
def to_http(
    channel: ChannelName = "nsq_to_http",
    post: list[str] | None = opt(
        "URL", "POST bodies to this URL; its path may be a template ('/{topic}/{.user}')."
    ),
    get: list[str] | None = opt("URL", "GET this URL, a template ('http://h/?m={body:url}')."),
    mode: EndpointMode = opt(
        "",
        "With several URLs: in rotation, by --key, the first that works, or all.",
        default=EndpointMode.ROUND_ROBIN,
    ),
    key: Callable[..., bytes] | None = opt(
        "TEMPLATE", "The key of --mode hash ('{.user.id}').", parser=compile_template
    ),
    concurrency: int = opt("N", "Concurrent requests.", default=100, min=1),
    http_client_connect_timeout: float = opt(
        "DURATION", "Timeout of a connection attempt.", default="2s", parser=parse_positive_duration
    ),
    http_client_request_timeout: float = opt(
        "DURATION", "Timeout of a request.", default="20s", parser=parse_positive_duration
    ),
    on_status: list[str] | None = opt(
        "STATUS=ACTION",
        "Action for a status: ok, retry, drop or dead-letter. 2xx is ok; 5xx, 401, 403, 404, 408, "
        "425, 429 retry; 3xx and other 4xx dead-letter.",
    ),
    redirects: Redirects = opt(
        "", "Follow redirects that keep method and body (307, 308).", default=Redirects.REFUSE
    ),
    private_addresses: bool = opt(
        "--private-addresses/--no-private-addresses",
        "Allow URLs on private networks; never redirects to other hosts there.",
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
    """Send topics to HTTP endpoints, finishing each message when one has accepted it.

    Runs until it is stopped or a limit is reached. A message is finished when the status is 2xx or
    a filter excludes it. If no endpoint works at the start, the command fails. In a URL, fields
    are percent-encoded, except {body:raw} and {.path:raw}. A failed request goes to the next URL,
    then its messages are requeued, after Retry-After or an exponential delay. While no endpoint
    works, messages are held and their queue grows. A message can arrive twice, with the same
    Idempotency-Key.

    With --mode all, a message is finished when every URL has accepted it. While one URL fails,
    messages are held for all; run a separate command with its own channel for endpoints that must
    not wait.

    --pick changes the body and the fields of the URL; --header and --key see the original message.
    A body that is not JSON where --where or --pick needs JSON becomes a dead letter, or is
    requeued.

    The exit status is 6 if there are dead letters or dropped messages, or if a limit ended the run
    while failed messages were back in their queue.

    Examples:
        nsq to-http -t clicks --post http://127.0.0.1:8080/hook
        nsq to-http -t clicks --post https://a/hook --post https://b/hook --mode failover
        nsq to-http -t log --batch 500 --linger 1s --batch-format ndjson --post http://logs:8080/bulk
        nsq to-http -t orders --sign-key-file key --dead-letter-file dead.jsonl --max-attempts 20 \\
            --header 'X-Customer: {.customer.id}' --post https://example.com/webhook
    """
    from nsqtools.forward.http_pool import http_tls
    from nsqtools.forward.http_requests import Endpoint
    from nsqtools.forward.http_sink import HttpSettings, HttpSink, open_pool, parse_policy

    if bool(post) == bool(get):
        raise ConfigurationError("give one or more --post, or one or more --get")
    make = partial(Endpoint, allows_private=private_addresses, is_get=bool(get))
    endpoints = list(map(make, post or get or ()))
    for endpoint in endpoints if get and not any(map(has_fields, requests.header or ())) else ():
        if not endpoint.has_fields:  # the same request would finish every message
            raise ConfigurationError(
                f"--get {endpoint.url} has no field of the message",
                hint="Write {body:url} where its body goes, as in 'http://host/?m={body:url}'.",
            )
    settings = HttpSettings(
        mode=mode,
        key=key,
        concurrency=concurrency,
        policy=parse_policy(on_status or ()),
        redirects=redirects,
        batch_count=requests.batch,
        batch_bytes=BATCH_BYTES if requests.batch_bytes is None else requests.batch_bytes,
        linger_s=LINGER_S if requests.linger is None else requests.linger,
    )
    tls = None
    if redirects is Redirects.FOLLOW or any(e.origin[0] == "https" for e in endpoints):
        tls = http_tls(http_ca_file, http_cert, http_key, is_insecure=http_insecure)
    elif http_ca_file or http_cert or http_key or http_insecure:
        raise ConfigurationError(
            "--http-ca-file, --http-cert, --http-key and --http-insecure are for https URLs",
            hint="Messages would be sent in plain text: begin the URL with https://.",
        )
    sink = HttpSink(
        endpoints,
        requests.builder(is_get=bool(get)),
        settings,
        open_pool(http_client_connect_timeout, http_client_request_timeout, tls),
    )
    return forwarding.run(
        forwarding.settings(channel, batch=requests.batch),
        sink,
        [endpoint.name for endpoint in endpoints],
        "Check the URL, and that a server listens there.",
    )


# -- nsq to-exec ----------------------------------------------------------------------------------

BATCH_WAIT_S = 1.0
MAX_RDY = 2500  # nsqd's default of -max-rdy-count


class CommandOptions(OptionSet):
    """Options of commands. Raises `ConfigurationError` if they contradict each other."""

    panel = "Commands"
    arg: bool = opt("", "Replace {} in the arguments with the body, except in scripts.")
    workers: int = opt("N", "Concurrent commands.", default=1, min=1, max=1000)
    batch: int = opt(
        "N", "Give up to N messages, as lines, to one command.", default=1, min=1, max=10_000
    )
    batch_wait: float | None = opt(
        "DURATION", "Longest wait of a message for its batch to fill.", show_default="1s"
    )
    persistent: bool = opt(
        "",
        "Keep the command running: it reads JSON lines, and answers each with a line: ok, "
        "requeue [DURATION], or dead [REASON].",
    )
    command_timeout: float = opt(
        "DURATION", "Timeout of a command (TERM, KILL after 5s); 0: none.", default="10m"
    )
    fatal_status: list[int] | None = opt(
        "STATUS", "Exit status that makes a dead letter.", DELIVERY, min=1, max=255
    )

    def check(self) -> None:
        modes = {"--arg": self.arg, "--batch": self.batch > 1, "--persistent": self.persistent}
        names = [name for name, is_set in modes.items() if is_set]
        if len(names) > 1:
            raise ConfigurationError(f"give either {names[0]} or {names[1]}")
        check_for_batch(self.batch, {"--batch-wait": self.batch_wait is not None})

    def settings(self, words: list[str], channel: str) -> ExecSettings:
        """Return the settings. Raises `ConfigurationError`, and `NotFoundError` for no program."""
        from nsqtools.forward.exec_sink import ExecSettings
        from nsqtools.forward.program_text import find_program_text

        program = shutil.which(words[0])
        if program is None:
            if os.path.isfile(words[0]):
                hint = f"Make it so: chmod +x {words[0]}, or name its interpreter."
                raise NotFoundError(f"{words[0]} is not executable", hint=hint)
            raise NotFoundError(f"no program {words[0]}", hint="Commands run without a shell.")
        if self.arg and not any("{}" in word for word in words[1:]):
            raise ConfigurationError("--arg needs {} among the arguments of the command")
        if self.arg and (text := find_program_text(words)) is not None:
            raise ConfigurationError(
                f"publishers could run commands: {words[0]} would run the body in place of {{}} in "
                f"{text!r}",
                hint="Give it to a script as an argument, for example "
                "sh -c 'echo \"$1\"' sh {}, or without --arg on standard input.",
            )
        return ExecSettings(
            program,
            tuple(words),
            channel,
            workers=self.workers,
            batch=self.batch,
            batch_wait_s=BATCH_WAIT_S if self.batch_wait is None else self.batch_wait,
            is_persistent=self.persistent,
            takes_argument=self.arg,
            timeout_s=self.command_timeout,
            fatal=frozenset(self.fatal_status or ()),
        )

    @property
    def max_in_flight(self) -> int:
        """Enough for the current and the next run of each worker.

        More would keep messages from other consumers. A persistent command answers a few hundred
        messages per round trip of nsqd.
        """
        return min(self.workers * (500 if self.persistent else 2 * self.batch), MAX_RDY)


def to_exec(
    command: Annotated[list[str], Argument(metavar="COMMAND", help="The command, after --.")],
    channel: ChannelName = "nsq_to_exec",
    *,
    commands: CommandOptions,
    forwarding: ForwardOptions,
) -> int:
    """Run a command for each message, finishing the message if the command exits with status 0.

    The body is on standard input; NSQ_TOPIC, NSQ_CHANNEL, NSQ_MESSAGE_ID, NSQ_TIMESTAMP (in
    nanoseconds) and NSQ_ATTEMPTS are in the environment. There is no shell; with --arg, a script
    gets the body as an argument (sh -c 'echo "$1"' sh {}), never as a part of it. A body that
    begins with - may be an option of the command unless -- precedes {}. Status 75 requeues the
    message and slows down, any other requeues it until --max-attempts. If a batch fails, it is run
    again in halves until the bad message is alone. A message is touched while its command runs, and
    no command outlives this program. Filtered messages are finished. A body that is not JSON where
    --where or --pick needs JSON becomes a dead letter, or is requeued.

    The exit status is 6 if there are dead letters, or if a limit ended the run while failed
    messages were back in their queue.

    Examples:
        nsq to-exec -t clicks -c import --workers 4 -- /usr/local/bin/import-click
        nsq to-exec -t users -c mail --pick .email --arg -- sendmail-template welcome {}
        nsq to-exec -t clicks -c load --batch 1000 -- psql -c 'COPY clicks FROM STDIN'
        nsq to-exec -t orders -c bill --persistent --max-attempts 5 --dead-letter-file dead.jsonl \\
            -- python3 bill.py
    """
    from nsqtools.forward.exec_sink import ExecSink

    settings = commands.settings(command, channel)
    if settings.fatal:
        forwarding.dead_letters.require("--fatal-status")
    forward_settings = forwarding.settings(
        channel, batch=commands.batch, max_in_flight=commands.max_in_flight
    )
    # A batch larger than max_in_flight would never be complete.
    batch = min(settings.batch, forward_settings.options.max_in_flight)
    sink = ExecSink(settings._replace(batch=batch), output_writer(forwarding.runtime))
    return forwarding.run(forward_settings, sink)


def output_writer(runtime: Runtime) -> Write:
    """Return the writer of command output to our streams.

    On a terminal it escapes control characters and clears the progress line first.
    """
    from nsqtools.protocol.text import escape_text

    streams = {1: (runtime.stdout, "stdout"), 2: (runtime.stderr, "stderr")}

    def write(number: int, data: bytes) -> None:
        stream, name = streams[number]
        if stream.isatty():
            data = escape_text(data)
            if runtime.shows_progress:
                data = CLEAR_LINE.encode() + data
        write_whole(stream.fileno(), data, name)

    return write
