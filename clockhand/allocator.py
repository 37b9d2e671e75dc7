"""Memory that was freed is kept for the next tensor.

glibc gives a large block back to the kernel the moment it is freed, and the kernel hands out the next one page by page,
each filled with zeros first. A training step allocates gigabytes in such blocks; getting pages took a third of the time
of a loss over 32,768 ids (LOG.md). Kept in the process, a block is simply used again.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def keep_freed_memory() -> bool:
    """Asks glibc to keep what is freed. Returns whether it will: elsewhere (macOS, musl, Windows) nothing changes."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
