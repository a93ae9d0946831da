"""The function that handles messages: import it by name, check it, import it again after a change.

A handler is named ``MODULE:FUNCTION``, with the current directory importable, as gunicorn names an
application.

A reload imports the handler's package again, and the other modules of the current directory that
were imported meanwhile. Installed packages and the standard library stay. The old modules return if
the import fails. Calls that have begun continue with the old code.

A handler takes JSON, text or bytes. With JSON, an annotation of the parameter is the type that the
value must have: a dataclass, a TypedDict, a model of pydantic, or anything else that pydantic
converts. pydantic does all of it, so that a type means the same whatever is installed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from nsqtools.client.message import Message
from nsqtools.errors import ConfigurationError
from nsqtools.files.opening import state_of
from nsqtools.work import Decoding

Function = Callable[[Any], Any]

Versions = dict[Path, tuple[int, ...] | None]
"""The `state_of` source files."""

EXAMPLE = "Write MODULE:FUNCTION, for example shop.handlers:bill."


class Handler(NamedTuple):
    """A checked function. ``decode`` makes its argument from a body; None passes the message."""

    name: str
    function: Function
    is_async: bool
    decode: Decoder | None


def make_handler(function: Any, name: str, decoding: Decoding | None) -> Handler:
    """Return the handler of a function. Raises `ConfigurationError` if it cannot be one."""
    if not callable(function):
        kind = type(function).__name__
        raise ConfigurationError(f"{name} is no function, but of type {kind}", hint=EXAMPLE)
    if isinstance(function, type):
        hint = "Name a function, or an object that can be called."
        raise ConfigurationError(f"{name} is a class, which each message would create", hint=hint)
    if _is_kind(function, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        raise ConfigurationError(f"{name} is a generator; a handler returns when it is done")
    decoder = make_decoder(_argument_type(function, name, decoding), name, decoding)
    return Handler(name, function, _is_kind(function, inspect.iscoroutinefunction), decoder)


def _is_kind(function: Any, *kinds: Callable[[object], bool]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return any(kind(function) or kind(type(function).__call__) for kind in kinds)


def _argument_type(function: Function, name: str, decoding: Decoding | None) -> Any:
    """Return the annotation of the argument, ``inspect.Parameter.empty`` without one."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C have none
        return inspect.Parameter.empty
    try:
        signature.bind(None)
    except TypeError:
        value = "the message" if decoding is None else "the decoded body"
        text = f"{name}{signature} cannot be called with one argument, {value}"
        raise ConfigurationError(text) from None
    parameter = next(iter(signature.parameters))
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception as exc:
        if decoding is not Decoding.json:  # often a name that only a type checker imports
            return inspect.Parameter.empty
        text = f"the annotation of {name} cannot be evaluated ({exc})"
        hint = "Import its type outside of TYPE_CHECKING."
        raise ConfigurationError(text, hint=hint) from None
    return signature.parameters[parameter].annotation


class NamedHandler:
    """A handler that is named ``MODULE:FUNCTION``. Raises `ConfigurationError` for another form."""

    def __init__(self, name: str, decoding: Decoding | None) -> None:
        self.name = name
        self._module, _, self._attribute = name.partition(":")
        self._decoding = decoding
        self._folder = os.getcwd()
        self._loaded: Versions = {}
        self._seen: Versions = {}
        if "/" in self._module or self._module.endswith(".py"):
            dotted = self._module.removesuffix(".py").strip("./").replace("/", ".")
            hint = f"Write {dotted}:{self._attribute or 'FUNCTION'}."
            raise ConfigurationError(f"{self._module} is a file, not a module", hint=hint)
        if not (self._module and self._attribute):
            raise ConfigurationError(f"{name!r} does not name a function", hint=EXAMPLE)

    def load(self) -> Handler:
        """Import the function, and check it.

        Raises `ConfigurationError`. Its cause is the exception of the imported code, if any.
        """
        if self._folder not in sys.path:
            sys.path.insert(0, self._folder)
        try:
            value: Any = importlib.import_module(self._module)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # a script may call sys.exit
            if isinstance(exc, ModuleNotFoundError) and self._is_ours(exc.name):
                hint = f"Modules are looked for in {self._folder} and among installed packages."
                raise ConfigurationError(f"no module named {exc.name}", hint=hint) from None
            text = f"cannot import {self._module} ({describe_exception(exc)})"
            raise ConfigurationError(text) from exc
        for name in self._attribute.split("."):
            if not hasattr(value, name):
                matches = get_close_matches(name, dir(value), 1)
                hint = f"Did you mean {matches[0]}?" if matches else ""
                where = getattr(value, "__file__", None) or self._module
                raise ConfigurationError(f"there is no {name} in {where}", hint=hint)
            value = getattr(value, name)
        return make_handler(value, self.name, self._decoding)

    def _is_ours(self, module: str | None) -> bool:
        return f"{self._module}.".startswith(f"{module}.")

    def reload(self) -> Handler:
        """Import the code again. Raises as `load`; the old modules are in place again then."""
        previous = self._modules()
        for name in previous:
            del sys.modules[name]
        importlib.invalidate_caches()
        try:
            return self.load()
        except BaseException:
            for name in self._modules():
                del sys.modules[name]
            sys.modules.update(previous)
            raise

    def _modules(self) -> dict[str, ModuleType]:
        """Return the imported modules of the handler's package and of the current directory."""
        packages = {self._module.partition(".")[0]}
        for name, module in list(sys.modules.items()):
            if "." not in name and name not in ("__main__", "nsqtools"):
                local = PathFinder.find_spec(name, [self._folder])
                spec = getattr(module, "__spec__", None)  # None in sys.modules blocks an import
                if local is not None and spec is not None and local.origin == spec.origin:
                    packages.add(name)
        modules = list(sys.modules.items())
        return {name: module for name, module in modules if name.partition(".")[0] in packages}

    def watch(self) -> None:
        """Take the current source files for those that are loaded."""
        self._loaded = self._seen = self._versions()

    def has_changed(self) -> bool:
        """Return, once for each change, whether source files have changed and rest again.

        A file that differs from the previous call may still be written: an import would read a part
        of it.
        """
        versions = self._versions()
        rests, self._seen = versions == self._seen, versions
        if not rests or versions == self._loaded:
            return False
        self._loaded = versions
        return True

    def _versions(self) -> Versions:
        """Return the version of each source file, also of those not imported."""
        files = [getattr(module, "__file__", None) for module in self._modules().values()]
        folders = {Path(file).parent for file in files if file}
        return {path: state_of(path) for folder in folders for path in folder.glob("*.py")}


def describe_exception(error: BaseException) -> str:
    """Return an exception in one line, with file and line of the code that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {error.msg}"
    text = traceback.format_exception_only(error)[-1].strip()
    frames = _user_frames(error)
    return f"{frames[-1].filename}:{frames[-1].lineno}: {text}" if frames else text


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of the import system and of this package."""
    lines = traceback.format_list(_user_frames(error)) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    package = os.path.dirname(os.path.dirname(__file__))
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((package, "<frozen importlib", importlib.__file__))
    ]


# -- bodies as values -----------------------------------------------------------------------------

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
