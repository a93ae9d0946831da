"""/debug of the daemons with what Python has: the paths are Go's, the content is not.

``goroutine`` shows the stacks of threads and tasks, ``heap`` what tracemalloc knows (it has to be
started with ``PYTHONTRACEMALLOC=1``) or the counts by type, ``profile`` runs cProfile in the thread
of the daemon. ``go tool pprof`` cannot read them.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import io
import pstats
import sys
import threading
import traceback
import tracemalloc
from collections import Counter

from starlette.responses import Response

from nsqtools.server.http.foundation import Call, Handler, plain_reply

_PAGES = ("cmdline", "goroutine", "heap", "profile", "block", "symbol", "threadcreate")
_DEFAULT_SECONDS = 30
_MAX_SECONDS = 300
_SHOWN = 40  # lines of a profile


def debug_handlers() -> dict[tuple[str, str], Handler]:
    """Return the handlers of nsqd by method and path."""
    return {
        **pprof_handlers("/debug/pprof/"),
        ("PUT", "/debug/setblockrate"): _set_block_rate,
        ("POST", "/debug/freememory"): _free_memory,
    }


def pprof_handlers(index: str) -> dict[tuple[str, str], Handler]:
    """Return the handlers of /debug/pprof; nsqd and nsqlookupd differ in the path of its index."""
    pages: dict[str, Handler] = {
        "cmdline": _command_line,
        "goroutine": _stacks,
        "heap": _heap,
        "profile": _profile,
        "block": _nothing,
        "symbol": _nothing,
        "threadcreate": _threads,
    }
    handlers = {("GET", f"/debug/pprof/{name}"): handler for name, handler in pages.items()}
    return {
        **handlers,
        ("GET", index): _index,
        ("POST", "/debug/pprof/symbol"): _nothing,
    }


async def _index(call: Call) -> Response:
    rows = "".join(f"<li><a href='/debug/pprof/{name}'>{name}</a></li>" for name in _PAGES)
    page = f"<html><head><title>/debug/pprof/</title></head><body><ul>{rows}</ul></body></html>\n"
    return Response(page, headers={"Content-Type": "text/html; charset=utf-8"})


async def _command_line(call: Call) -> Response:
    return plain_reply("\0".join([sys.executable, *sys.argv]))


async def _stacks(call: Call) -> Response:
    out = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        out.write(f"thread {names.get(ident, ident)}\n")
        traceback.print_stack(frame, file=out)
        out.write("\n")
    for task in asyncio.all_tasks():
        task.print_stack(file=out)
        out.write("\n")
    return plain_reply(out.getvalue())


async def _heap(call: Call) -> Response:
    if tracemalloc.is_tracing():
        top = tracemalloc.take_snapshot().statistics("lineno")[:_SHOWN]
        return plain_reply("\n".join(map(str, top)) + "\n")
    kinds = Counter(type(found).__name__ for found in gc.get_objects())
    lines = [f"{count:>10} {kind}" for kind, count in kinds.most_common(_SHOWN)]
    hint = "start with PYTHONTRACEMALLOC=1 to see where memory was allocated"
    return plain_reply("\n".join([f"objects known to the collector; {hint}", *lines]) + "\n")


async def _profile(call: Call) -> Response:
    text = call.query().get("seconds", "")
    seconds = int(text[:9]) if text.isdecimal() else 0
    profiler = cProfile.Profile()
    try:
        profiler.enable()
    except ValueError:
        return plain_reply("another profile is being taken\n", 500)
    try:
        await asyncio.sleep(min(seconds or _DEFAULT_SECONDS, _MAX_SECONDS))
    finally:
        profiler.disable()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(_SHOWN)
    return plain_reply(out.getvalue())


async def _threads(call: Call) -> Response:
    names = sorted(thread.name for thread in threading.enumerate())
    return plain_reply("\n".join(names) + "\n")


async def _nothing(call: Call) -> Response:
    return plain_reply("Python has no such profile\n")


async def _set_block_rate(call: Call) -> Response:
    rate = call.query().get("rate", "")
    if not rate.removeprefix("-").removeprefix("+").isdecimal():
        text = f'invalid block rate : strconv.Atoi: parsing "{rate}": invalid syntax'
        return plain_reply(text, 400)
    return plain_reply("")


async def _free_memory(call: Call) -> Response:
    gc.collect()
    return plain_reply("")
