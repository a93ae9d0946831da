"""The ``E_*`` codes, for both sides: which close the connection, and which error each becomes.

Only the three answers to a late FIN, REQ or TOUCH leave the connection open; every other code,
known or not, is fatal (protocol page, and nsqd/protocol_v2.go). A frame's data is the code, a
blank and a text for people: the text may name ids and may change, so only the code is compared. The
one exception is an nsqd that requires TLS, which says so only in the text of E_INVALID. The text is
escaped, because it goes into log lines.
"""

from __future__ import annotations

from nsqtools.errors import ServerError, ServerRefused
from nsqtools.protocol.text import escape_line

SURVIVABLE_CODES = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})
REFUSING_CODES = frozenset({"E_AUTH_FAILED", "E_AUTH_ERROR", "E_AUTH_FIRST", "E_UNAUTHORIZED"})

_HINTS = {
    "E_AUTH_FIRST": "Set auth_secret (nsq: --auth-secret-file or NSQ_AUTH_SECRET).",
    "E_AUTH_FAILED": "The auth server did not accept the secret, or nsqd could not reach it.",
    "E_UNAUTHORIZED": "The secret does not allow this on this topic and channel.",
    "E_BAD_PROTOCOL": "Is this nsqd's TCP port? nsqlookupd's TCP port answers like this.",
    "E_BAD_BODY": "This is outside nsqd's limits: see its flags, and nsq config show for ours.",
    "E_BAD_MESSAGE": "nsqd's --max-msg-size bounds a message, and an empty message is refused.",
}

_WANTS_TLS = "TLS required"
_HINT_TLS = "This nsqd takes TLS only: set tls_v1 (nsq: --tls)."


def decode_error(data: bytes, where: str = "") -> ServerError:
    """Turn the data of an error frame into the error to raise; ``where`` names the peer."""
    code, _, text = escape_line(data.decode("utf-8", "backslashreplace")).partition(" ")
    wants_tls = code == "E_INVALID" and _WANTS_TLS in text
    kind = ServerRefused if code in REFUSING_CODES or wants_tls else ServerError
    hint = _HINT_TLS if wants_tls else _HINTS.get(code, "")
    return kind(code, text, fatal=code not in SURVIVABLE_CODES, where=where, hint=hint)


class RequestError(Exception):
    """A request that is refused, and the connection with it: code and text of the error frame."""

    def __init__(self, code: str, text: str | bytes) -> None:
        super().__init__(code, text)
        self.data = code.encode() + b" " + (text.encode() if isinstance(text, str) else text)
