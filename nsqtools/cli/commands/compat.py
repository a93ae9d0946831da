"""Run this program under the names of the Go utilities, with their flags: `go_main`.

A utility runs as the native command that `go_utilities` translates it to. nsq_stat is implemented
here, because no native command has its columns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsqtools.cli.commands.go_utilities import TRANSLATORS, UTILITIES, FlagValues, GoFatal
from nsqtools.cli.running.runtime import Runtime, report_error, stop_on_signals
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.option_names import split_option
from nsqtools.protocol.text import escape_line, format_duration
from nsqtools.server.go_flags import FlagError, parse_flags, report_flag_error

if TYPE_CHECKING:
    from nsqtools.cluster.sampling import Sample

# Lines between two headers, as in nsq_stat.
HEADER_EVERY = 25


def print_stat(values: FlagValues, runtime: Runtime) -> int:
    """Print the table of nsq_stat."""
    from nsqtools.cluster.directory import open_cluster
    from nsqtools.cluster.sampling import SampleFilter, Sampler

    options = {"lookupd_poll_timeout": format_duration(values["http-client-request-timeout"])}
    connection = ConnectionSettings(
        (), values["lookupd-http-address"], values["nsqd-http-address"], options
    )
    with open_cluster(connection) as cluster:
        sampler = Sampler(cluster, SampleFilter((values["topic"],), (values["channel"],)))
        with stop_on_signals(sampler.stop):
            samples = sampler.samples(values["interval"], values["count"] or None)
            for number, sample in enumerate(samples):
                for failure in sample.failures:
                    runtime.info(f"nsq_stat: {failure.error}")
                if number % HEADER_EVERY == 0:
                    runtime.stdout.write(STAT_HEADER)
                runtime.stdout.write(stat_line(sample))
                runtime.stdout.flush()
    return 0


STAT_FORM = "{:>7} {:>7} | {:>7} {:>7} {:>7} {:>5} {:>5} | {:>7} {:>7} {:>12} {:>7}\n"
STAT_HEADER = (
    "------rate------+----------------depth----------------"
    "+--------------metadata---------------\n"
    + STAT_FORM.format(
        "ingress", "egress", "total", "mem", "disk", "inflt", "def", "req", "t-o", "msgs", "clients"
    )
)
STAT_COUNTS = "depth memory disk in_flight deferred requeued timed_out messages clients"


def stat_line(sample: Sample) -> str:
    """Return a line of nsq_stat, "" while the channel does not exist."""
    if not sample.totals:
        return ""
    row = sample.totals[0]
    rates = (int(row.rates.ingress), int(row.rates.egress)) if row.rates is not None else (0, 0)
    return STAT_FORM.format(*rates, *(getattr(row, name) for name in STAT_COUNTS.split()))


# The version of the utilities.
VERSION = "1.3.0"
# Exit statuses after SIGINT and SIGTERM, which are 0 in the utilities.
SIGNALS = (130, 143)


def go_main(program: str, arguments: Sequence[str]) -> int:
    """Run ``program`` with Go's flags; return its exit status."""
    try:
        values = read_flags(program, arguments)
        if values.get("version"):
            from nsqtools import __version__

            sys.stdout.write(f"{program} v{VERSION} (nsqtools {__version__})\n")
            return 0
        status = _run(program, values, TRANSLATORS[program](values))
    except FlagError as exc:
        return report_flag_error(exc, program, UTILITIES[program])
    except GoFatal as exc:
        sys.stderr.write(f"{program}: {escape_line(str(exc))}\n")
        return 1
    if status in SIGNALS:
        return 0
    return 1 if 0 < status < 128 else status


def read_flags(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return every flag of a utility with its value, and the "umask" of the process.

    Raises `FlagError` and `HelpAsked`, and `GoFatal` for other arguments that the utility refuses.
    """
    flags = UTILITIES[program]
    parsed = parse_flags(flags, arguments)
    values = {name: flag.default for name, flag in flags.items()} | parsed.options
    # The umask can be read only by setting it.
    os.umask(umask := os.umask(0))
    values["umask"] = umask
    if program == "nsq_to_file" and parsed.rest:
        raise GoFatal(f"unknown arguments: [{' '.join(parsed.rest)}]")
    if parsed.asks_version:
        values["version"] = True
    # nsq_to_file ignores unknown options. Here they are refused later, by the native command.
    elif program != "nsq_to_file":
        for flag in ("consumer-opt", "producer-opt"):
            for text in values.get(flag, ()):
                _check_client_option(flag, text)
    return values


def _check_client_option(flag: str, text: str) -> None:
    """Raise `FlagError` for a client option that go-nsq does not have."""
    from nsqtools.client.options import read_option

    name, value = split_option(text)
    try:
        read_option(name, value)
    except ConfigurationError as exc:
        reason = f"invalid option {name}" if "unknown" in str(exc) else str(exc)
        raise FlagError(f'invalid value "{text}" for flag -{flag}: {reason}') from None


def _run(program: str, values: FlagValues, argv: Sequence[str]) -> int:
    for name in [name for name in os.environ if name.startswith("NSQ_") and name != "NSQ_DEBUG"]:
        del os.environ[name]
    runtime = Runtime(sys.stdout, sys.stderr, {**os.environ, "XDG_CONFIG_HOME": os.devnull})
    try:
        if program == "nsq_stat":
            return print_stat(values, runtime)
        from nsqtools.cli.parsing.app import run

        return run(argv, runtime)
    except BrokenPipeError:
        # `main` handles a closed pipe.
        raise
    except (NsqError, OSError) as exc:
        return report_error(exc, sys.stderr, debug=bool(os.environ.get("NSQ_DEBUG")))
