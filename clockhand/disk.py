"""Writing so that a file or a folder is whole or absent, whenever the process dies and however full the disk is.

Everything is written under a hidden name beside its place, brought to the disk, and renamed. The name is one that no
other writer has, of this process or another, and a folder's writer holds a lock in it: a process that dies leaves at
most something hidden that nobody holds, which the next writer of the same folder removes.
"""

import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clockhand.errors import ClockhandError
from clockhand.lock import is_held, release, take

HIDDEN = ".unfinished"
REPLACED = ".replaced"
HOLDER = ".held"
"""The file in a hidden folder on which its writer has a lock."""
NEWBORN = 60
"""Seconds for which a hidden folder that nobody holds may be about to be held."""
_in_turn = threading.Lock()
LEFTOVERS = (f"{HIDDEN}-*", f".*{HIDDEN}-*")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder of the same name to write into. It takes the place of `folder` when the block ends well.

    When it does not, nothing has changed. Raises `ClockhandError` for whatever the disk refuses.
    """
    folder = folder.absolute()
    hidden = folder.parent / f"{HIDDEN}-{secrets.token_hex(4)}-{folder.name}"
    unfinished, replaced = hidden / folder.name, hidden / REPLACED
    try:
        with _refusals_of_the_disk(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(folder.parent):
                remove_leftovers_of(folder)
                hidden.mkdir()
                take(hidden / HOLDER)
            unfinished.mkdir()
            yield unfinished
            for path in (*unfinished.iterdir(), unfinished):
                _to_disk(path)
            with _alone_in(folder.parent):
                try:
                    if folder.exists():
                        folder.rename(replaced)
                    unfinished.rename(folder)
                finally:
                    if replaced.exists() and not folder.exists():
                        replaced.rename(folder)
            _to_disk(folder.parent)
    finally:
        release(hidden / HOLDER)
        shutil.rmtree(hidden, ignore_errors=True)


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """One writer at a time, of all threads and processes, begins a folder in `parent` or puts one in its place."""
    descriptor = None
    with _in_turn:
        try:
            with suppress(ImportError, OSError):  # Windows, or a file system without locks
                import fcntl

                descriptor = os.open(parent, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. It takes the place of `path` when the block ends well.

    Raises `ClockhandError` for whatever the disk refuses.
    """
    unfinished = path.with_name(f".{path.name}{HIDDEN}-{secrets.token_hex(4)}")
    try:
        with _refusals_of_the_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            _to_disk(unfinished)
            unfinished.replace(path)
    finally:
        with suppress(OSError):  # what stands in the way has been said, and of the place, not of this name
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a file, or leaves it as it was. Raises `ClockhandError` for whatever the disk refuses."""
    with new_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def remove_leftovers(root: Path) -> None:
    """Removes what a process that died in the middle of writing has left directly under `root`."""
    for leftover in (path for pattern in LEFTOVERS for path in root.glob(pattern)):
        if leftover.is_dir():
            _finish_exchange(leftover)
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def remove_leftovers_of(folder: Path) -> None:
    """Removes what processes that died while they wrote `folder` have left beside it."""
    name = re.compile(rf"{re.escape(HIDDEN)}-[0-9a-f]+-{re.escape(folder.name)}")
    for path in folder.parent.glob(f"{HIDDEN}-*"):
        if name.fullmatch(path.name) and _is_nobodys(path):
            _finish_exchange(path)
            shutil.rmtree(path, ignore_errors=True)


def _is_nobodys(hidden: Path) -> bool:
    """Whether the writer of a hidden folder has died. One that has just made it may not hold it yet."""
    if (hidden / HOLDER).exists():
        return not is_held(hidden / HOLDER)
    with suppress(OSError):
        return time.time() - hidden.stat().st_mtime > NEWBORN
    return False


def _finish_exchange(hidden: Path) -> None:
    """Where the process died after the old folder had stepped aside, the new one is whole: it takes its place."""
    if (hidden / REPLACED).exists():
        for folder in hidden.iterdir():
            place = hidden.parent / folder.name
            if folder.name not in (REPLACED, HOLDER) and not place.exists():
                folder.rename(place)


@contextmanager
def _refusals_of_the_disk(target: Path) -> Iterator[None]:
    from safetensors import SafetensorError  # what its writer says of a full disk

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            reason = f"{error.filename} is a file where a folder is needed"
        raise ClockhandError(f"cannot write '{_place(target)}': {reason}; what was there before is whole") from error


def _place(target: Path) -> Path:
    """Where `target` will be once all folders around it are renamed: what is written may be a part of a folder."""
    return Path(*(part for part in target.parts if not part.startswith(f"{HIDDEN}-")))


def _to_disk(path: Path) -> None:
    """Returns when the file, or the list of names in the folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
