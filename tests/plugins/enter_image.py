"""Enter a stage of `image`: ``enter_image.py SETTINGS``, as root of namespaces of its own.

Lays the stage's root over this machine's, puts Python where the image of Python has it, becomes the
user, and runs the command. Its mounts go with the namespace.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def start_loopback() -> None:
    """A network of one's own begins without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def main() -> None:
    settings = json.loads(sys.argv[1])
    upper = Path(settings["root"])
    work, root = upper.with_name(f"{upper.name}.work"), upper.with_name(f"{upper.name}.root")
    for directory in (work, root):
        directory.mkdir(exist_ok=True)
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    mount(
        "-t", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", "overlay", str(root)
    )
    mount("--rbind", "/dev", f"{root}/dev")
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", f"{root}/tmp")
    python = root / "usr/local/image-python"
    python.mkdir(exist_ok=True)
    mount("--bind", settings["python"], str(python))
    # a script and no link: Python finds its library by the place where it is started
    program = root / "usr/local/bin/python"
    program.unlink(missing_ok=True)
    real = f"/usr/local/image-python/bin/{settings['program']}"
    program.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    program.chmod(0o755)
    for path, shared in settings["shared"].items():
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mount("--bind", shared, f"{root}{path}")
    if not settings["is_online"]:
        start_loopback()
    os.chroot(root)
    os.chdir(settings["workdir"])
    user, group = map(int, settings["user"].split(":"))
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    home = {"HOME": "/root" if user == 0 else "/home/nsq"}
    command = settings["command"]
    os.environ["PATH"] = settings["environ"]["PATH"]  # where the command is looked for
    os.execvpe(command[0], command, {**home, **settings["environ"]})


main()
