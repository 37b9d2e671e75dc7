"""Writing so that a file or a folder is whole or absent, whenever the process dies and however full the disk is.

Everything is written under a hidden name, brought to the disk, and renamed into its place. A process that dies leaves
at most something hidden, which the next run removes.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from clockhand.errors import ClockhandError

LEFTOVERS = (".unfinished", ".*.unfinished*", ".*.old-*")  # ours, and what interop's save_model can leave


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Where to make a folder that takes the place of `folder` when the block ends well, and vanishes when it does not.

    Its name is the same, in a hidden folder beside. Raises `ClockhandError` for whatever the disk refuses.
    """
    hidden = folder.parent / ".unfinished"
    unfinished = hidden / folder.name
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            _to_disk(path)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        _to_disk(folder.parent)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ClockhandError(f"cannot write {folder}: {reason}; what was saved before is whole") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a file, or leaves it as it was. Raises `ClockhandError` for whatever the disk refuses."""
    hidden = path.with_name(f".{path.name}.unfinished")
    try:
        hidden.write_text(text, encoding="utf-8")
        _to_disk(hidden)
        hidden.replace(path)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise ClockhandError(f"cannot write {path}: {error.strerror}") from error


def remove_leftovers(root: Path) -> None:
    """Removes what a process that died in the middle of writing has left directly under `root`."""
    for leftover in (path for pattern in LEFTOVERS for path in root.glob(pattern)):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _to_disk(path: Path) -> None:
    """Returns when the file, or the list of names in the folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
