"""Names of client options in go-nsq, in flags of commands and in environment variables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

ENV = "NSQ_"
"""Prefix of the environment variable of a flag."""

OPTION_OF_FLAG = {
    "tls": "tls_v1",
    "tls_ca_file": "tls_root_ca_file",
    "tls_cert": "tls_cert",
    "tls_key": "tls_key",
    "tls_insecure": "tls_insecure_skip_verify",
    "tls_min_version": "tls_min_version",
    "snappy": "snappy",
    "deflate": "deflate",
    "deflate_level": "deflate_level",
    "auth_secret_file": "auth_secret_file",
    "auth_requires_tls": "auth_requires_tls",
    "tls_pin_sha256": "tls_pin_sha256",
    "timeout": "lookupd_poll_timeout",
    "lookupd_authorization": "lookupd_authorization",
    "allow_announced": "allow_announced",
    "max_in_flight": "max_in_flight",
}
"""The flags of commands, and the variables ``NSQ_FLAG``, that set an option of go-nsq's name."""


def split_option(text: str) -> tuple[str, str]:
    """Return the name and value of a client option: ``key,value``, ``key=value`` or ``key``."""
    end = min((text.index(mark) for mark in ",=" if mark in text), default=len(text))
    return text[:end].strip().replace("-", "_"), text[end + 1 :].strip()


def options_in_environment(environ: Mapping[str, str], role: str) -> Iterator[tuple[str, str, str]]:
    """Iterate over variables that set an option, with the option and its text."""
    for flag, option in OPTION_OF_FLAG.items():
        variable = ENV + flag.upper()
        if text := environ.get(variable):  # an empty variable counts as unset, as in commands
            yield variable, option, text
            if flag == "deflate_level" and not environ.get(f"{ENV}DEFLATE"):
                yield variable, "deflate", "true"
    if secret := environ.get(f"{ENV}AUTH_SECRET"):
        yield f"{ENV}AUTH_SECRET", "auth_secret", secret
    variable = f"{ENV}{role.upper()}_OPT"
    for option, text in map(split_option, environ.get(variable, "").split()):
        yield variable, option, text
