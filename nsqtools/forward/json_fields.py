"""nsq_to_nsq's filters by JSON field, as programs of jq, which keep numbers and order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from nsqtools.errors import ConfigurationError
from nsqtools.records.filters import Filter, every, where
from nsqtools.records.queries import compile_pick

Pick = Callable[[bytes], bytes | None]


def json_filters(
    keep: Filter | None,
    pick: Pick | None,
    *,
    required: str | None,
    value: str | None,
    whitelist: Sequence[str],
) -> tuple[Filter | None, Pick | None]:
    """Return what selects and what transforms, these options and others together.

    ``required`` is a field that an object must have, ``value`` the text or number that it must be;
    ``whitelist`` are the fields that are kept. Raises `ConfigurationError`.
    """
    if value is not None and required is None:
        raise ConfigurationError("--require-json-value needs --require-json-field")
    if required is not None:
        field = json.dumps(required)
        program = f'type == "object" and has({field})'
        if value is not None:
            program += f" and ({_is_value(f'.[{field}]', value)})"
        keep = every([where(program), *([keep] if keep is not None else [])])
    if whitelist:
        if pick is not None:
            raise ConfigurationError("give either --pick or --whitelist-json-field")
        names = json.dumps(list(whitelist))
        chosen = f"with_entries(select(.key as $key | {names} | index([$key])))"
        pick = compile_pick(f'if type == "object" then {chosen} else error("not an object") end')
    return keep, pick


def _is_value(field: str, value: str) -> str:
    is_text = f"{field} == {json.dumps(value)}"
    try:
        number = json.loads(value)
        is_number = not isinstance(number, bool) and math.isfinite(number)
    except (ValueError, TypeError, OverflowError):
        return is_text
    if not is_number:  # Python reads NaN and Infinity, which are no JSON
        return is_text
    return f"{is_text} or {field} == {value.strip()}"
