"""Memory that was freed is kept for the next tensor.

glibc gives a large block back to the kernel the moment it is freed, and the kernel hands out the next one page by page,
each filled with zeros first. A training step allocates gigabytes in such blocks; getting pages took a third of the time
of a loss over 32,768 ids (LOG.md). Kept in the process, a block is simply used again.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # from malloc.h
_LARGEST_BLOCK = 2**25  # that glibc will not hand to the kernel at once, if blocks of some size still are


def keep_freed_memory(most: int | None = None) -> bool:
    """Asks glibc to keep what is freed: all of it, or at most so many bytes, and then only of blocks up to 32 MiB.

    Returns whether it will: elsewhere (macOS, musl, Windows) nothing changes. Nor is all taken back by some.
    """
    global _keeps_all
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    if most is None:
        _keeps_all = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
        return _keeps_all
    return _keeps_all or (bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)) and bool(mallopt(_M_TRIM_THRESHOLD, most)))


_keeps_all = False
