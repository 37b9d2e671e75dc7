"""A lock that one process holds on a file: whoever comes second is told, and a process that dies lets go.

It is advisory: only those who ask are kept out. What counts is who holds the file open; one that a dead process has
left behind is nobody's.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import IO

_held: dict[Path, IO[bytes]] = {}
PATIENCE = 0.25
"""Seconds for which `take` tries: whoever asks `is_held` has the lock for an instant."""


def take(path: Path) -> bool:
    """Whether the lock is ours now, or was already. Raises `OSError` where the file cannot be made."""
    path = path.resolve()
    if path in _held:
        return True
    until = time.monotonic() + PATIENCE
    while not (taken := _take_now(path)) and time.monotonic() < until:
        time.sleep(PATIENCE / 50)
    return taken


def _take_now(path: Path) -> bool:
    file = path.open("ab")
    try:
        _lock(file)
        if not _is_still_there(path, file):  # its holder let go, and the file with it, between our two steps
            file.close()
            return _take_now(path)
    except BlockingIOError:
        file.close()
        return False
    except OSError:  # a file system that has no locks: there is nobody to ask
        file.close()
        return True
    _held[path] = file
    return True


def release(path: Path) -> None:
    """Lets go, if it was ours."""
    file = _held.pop(path.resolve(), None)
    if file is not None:
        with contextlib.suppress(OSError):  # Windows removes no open file; it may stay
            path.unlink()
        file.close()  # with it goes the lock


def is_held(path: Path) -> bool:
    """Whether some process holds the lock, this one or another.

    To know it, the lock is taken and let go at once: `flock` answers no other question. `take` waits that out.
    """
    path = path.resolve()
    if path in _held:
        return True
    try:
        with path.open("rb") as file:
            _lock(file)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks here: nobody is known to hold it
        return False
    return False


def _is_still_there(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError from error

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
