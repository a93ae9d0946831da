"""/debug of the daemons: the paths are Go's, the content is not.

``goroutine`` shows the stacks of threads and tasks. The other profiles are Go's alone.
"""

from __future__ import annotations

import asyncio
import gc
import io
import sys
import threading
import traceback

from nsqtools.server.http.foundation import Call, Handler, Reply, html_reply, plain_reply

_PAGES = ("cmdline", "goroutine", "heap", "profile", "block", "symbol", "threadcreate")


def debug_handlers() -> dict[tuple[str, str], Handler]:
    """Return the handlers of nsqd by method and path."""
    return {
        **pprof_handlers("/debug/pprof/"),
        ("PUT", "/debug/setblockrate"): _set_block_rate,
        ("POST", "/debug/freememory"): _free_memory,
    }


def pprof_handlers(index: str) -> dict[tuple[str, str], Handler]:
    """Return the handlers of /debug/pprof; nsqd and nsqlookupd differ in the path of its index."""
    handlers: dict[tuple[str, str], Handler] = {
        ("GET", f"/debug/pprof/{name}"): _nothing for name in _PAGES
    }
    return {
        **handlers,
        ("GET", index): _index,
        ("GET", "/debug/pprof/cmdline"): _command_line,
        ("GET", "/debug/pprof/goroutine"): _stacks,
        ("POST", "/debug/pprof/symbol"): _nothing,
    }


def _index(call: Call) -> Reply:
    rows = "".join(f"<li><a href='/debug/pprof/{name}'>{name}</a></li>" for name in _PAGES)
    return html_reply(
        f"<html><head><title>/debug/pprof/</title></head><body><ul>{rows}</ul></body></html>\n"
    )


def _command_line(call: Call) -> Reply:
    return plain_reply("\0".join([sys.executable, *sys.argv]))


def _stacks(call: Call) -> Reply:
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


def _nothing(call: Call) -> Reply:
    return plain_reply("Python has no such profile\n")


def _set_block_rate(call: Call) -> Reply:
    rate = call.query().get("rate", "")
    if not rate.removeprefix("-").removeprefix("+").isdecimal():
        text = f'invalid block rate : strconv.Atoi: parsing "{rate}": invalid syntax'
        return plain_reply(text, 400)
    return plain_reply("")


def _free_memory(call: Call) -> Reply:
    gc.collect()
    return plain_reply("")
