"""``nsq options``: what ``--consumer-opt`` and ``--producer-opt`` take."""

from __future__ import annotations

from nsqtools.cli.options.forms import ListingForm
from nsqtools.cli.running.runtime import Session


def options(*, form: ListingForm, runtime: Session) -> None:
    """List every client option with its default, bounds and meaning.

    The names are go-nsq's. Give them to any command as --consumer-opt NAME=VALUE or
    --producer-opt NAME=VALUE (-X NAME=VALUE for short), or in a profile. -X list shows this list.

    Examples:
        nsq options
        nsq options --json | jq -r '.[].option'
        nsq tail -t clicks --consumer-opt max_attempts=10
        nsq pub -X list
    """
    from nsqtools.cli.options.client_options import write_client_options

    write_client_options(runtime, form)
