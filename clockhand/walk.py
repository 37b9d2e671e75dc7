"""All folders under a folder, however deep they lie.

`os.walk` of Python 3.11 calls itself for each level and ends with a RecursionError near the thousandth.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path


def walk(root: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk` from the top: each folder with the names of its folders, to be sorted or thinned out, and files."""
    waiting = [str(root)]
    while waiting:
        for parent, folders, files in os.walk(waiting.pop(), onerror=onerror):
            yield parent, folders, files
            paths = (os.path.join(parent, name) for name in reversed(folders))
            waiting += (path for path in paths if not os.path.islink(path))
            break  # one level: the next ones wait
