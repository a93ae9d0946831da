"""Bodies as the values that a handler takes: JSON, text or bytes.

With JSON, an annotation of the parameter is the type that the value must have: a dataclass, a
TypedDict, a model of pydantic, or anything else that pydantic converts. pydantic does all of it, so
that a type means the same whatever is installed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from nsqtools.client.message import Message
from nsqtools.errors import ConfigurationError
from nsqtools.work import Decoding

Decoder = Callable[[bytes], Any]
"""Raises ``ValueError`` for a body that does not fit. Its text has the reason, without values."""

# Mistakes in one body that a reason names.
MAX_REPORTED = 5


_TYPES = {None: Message, Decoding.text: str, Decoding.bytes: bytes}


def make_decoder(annotation: Any, name: str, decoding: Decoding | None) -> Decoder | None:
    """Return the decoder for the argument of the handler ``name``, None for the message itself.

    Raises `ConfigurationError` if the annotation contradicts ``decoding`` or cannot be decoded.
    """
    is_free = annotation in (inspect.Parameter.empty, Any)
    if decoding is Decoding.json:
        return _decode_json if is_free else _typed_decoder(annotation, name)
    passed = _TYPES[decoding]
    is_class = isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False)
    if is_class and not is_free and annotation not in passed.__mro__:
        text = f"{name} takes {annotation.__name__}, but would get {passed.__name__}"
        raise ConfigurationError(text, hint="Choose by decode: json, text, bytes, or the message.")
    return {None: None, Decoding.text: bytes.decode, Decoding.bytes: bytes}[decoding]


def _decode_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _typed_decoder(annotation: Any, name: str) -> Decoder:
    if annotation is Message:
        hint = "Leave decode out, or annotate the type of the body."
        raise ConfigurationError(f"{name} takes a Message, but would get a value", hint=hint)
    try:
        from pydantic import TypeAdapter, ValidationError
    except ModuleNotFoundError:
        text = f"the package pydantic is not installed, which converts to the type of {name}"
        raise ConfigurationError(text, hint="pip install pydantic, or no annotation.") from None
    try:
        validate = TypeAdapter(annotation).validate_json
    except Exception as exc:  # PydanticSchemaGenerationError, PydanticUserError, NameError
        reason = str(exc).partition("\n")[0]
        raise ConfigurationError(f"{name} has a type that cannot be decoded: {reason}") from exc

    def decode(body: bytes) -> Any:
        try:
            return validate(body)
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False, include_context=False)
            reasons = [": ".join([*_path(error["loc"]), error["msg"]]) for error in errors]
            raise ValueError("; ".join(reasons[:MAX_REPORTED])) from None

    return decode


def _path(location: tuple[int | str, ...]) -> list[str]:
    return [".".join(map(str, location))] if location else []
