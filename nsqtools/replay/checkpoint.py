"""How far a replay has come: of each file, how many messages are done with.

The file is replaced whole and fsynced after each batch, so an interrupted replay continues where it
stopped: nothing is left out, and what is doubled is at most the one batch under way.
"""

from __future__ import annotations

import json
from pathlib import Path

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import replace_file

VERSION = 1


class Checkpoint:
    """Reads ``path`` if it is there. Raises `ConfigurationError` for one that is not ours."""

    def __init__(self, path: Path) -> None:
        self.done: dict[str, int] = {}
        self._path = path.absolute()
        try:
            content = json.loads(self._path.read_bytes())
            if content["version"] != VERSION:
                raise ValueError
            self.done = {str(name): int(count) for name, count in content["done"].items()}
        except FileNotFoundError:
            pass
        except OSError as exc:
            raise OutputError(f"cannot read {path} ({exc.strerror})") from exc
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigurationError(
                f"{path} is not the checkpoint of a replay", hint="Give another file."
            ) from None

    def save(self) -> None:
        """Make it durable. Raises `OutputError`."""
        content = json.dumps({"version": VERSION, "done": self.done}, indent=1).encode()
        try:
            replace_file(self._path, content)
        except OSError as exc:
            raise OutputError(f"cannot write {self._path} ({exc.strerror})") from exc
