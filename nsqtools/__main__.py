"""``python -m nsqtools`` is ``nsq``."""

from __future__ import annotations

from nsqtools.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
