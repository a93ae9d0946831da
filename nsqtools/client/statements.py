"""What is said about the client options, and which of it holds.

Every flag, every ``--consumer-opt`` and every option of a Spark source or sink is a `Statement`: an
option under go-nsq's name, a value as text, and where it was said. `settle` makes one mapping of
them. (The options themselves are imported there and not before: a help page does not need them.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from nsqtools.errors import ConfigurationError

OPTION_OF_FLAG = {
    "tls": "tls_v1",
    "tls_ca_file": "tls_root_ca_file",
    "tls_insecure": "tls_insecure_skip_verify",
}
"""go-nsq's names, where they are not the flag's own."""


class Statement(NamedTuple):
    """``option`` shall be ``text``, says ``speaker``. What has the greater ``origin`` holds."""

    option: str
    text: str
    origin: int
    speaker: str


def settle(statements: Iterable[Statement]) -> dict[str, Statement]:
    """The statement that holds for each option: the one of the stronger origin.

    Raises `ConfigurationError` for an unknown option, and where two of the same origin differ.
    """
    from nsqtools.client.options import read_option

    settled: dict[str, Statement] = {}
    for said in statements:
        before = settled.get(said.option)
        _, value = read_option(said.option, said.text)
        if before is None or said.origin > before.origin:
            settled[said.option] = said
        elif said.origin == before.origin and value != read_option(*before[:2])[1]:
            raise ConfigurationError(
                f"{before.speaker} and {said.speaker} contradict each other",
                hint=f"Keep one of them: both set the client option {said.option}.",
            )
    return settled


def check_tls(
    settled: Mapping[str, Statement], http_addresses: Iterable[str], *, cure: str
) -> None:
    """Refuse TLS settings that would do nothing: the connection would be plain text unnoticed.

    ``cure`` is the hint. Raises `ConfigurationError`.
    """
    asked = [said for option, said in settled.items() if option.startswith("tls_")]
    if not asked or "tls_v1" in settled:
        return
    if not any(address.startswith("https://") for address in http_addresses):
        raise ConfigurationError(
            f"{asked[0].speaker} is given, but TLS is not switched on", hint=cure
        )


def read_secret(path: Path) -> str:
    """The secret in a file, without the newline at its end. Raises `ConfigurationError`."""
    try:
        secret = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(
            f"cannot read the auth secret from {path} ({reason})",
            hint="The file holds the secret and nothing else.",
        ) from error
    if not secret:
        raise ConfigurationError(f"the auth secret file {path} is empty")
    return secret
