"""Memory that was freed is kept for the next tensor, and what is read over and over lies in large pages.

glibc gives a large block back to the kernel the moment it is freed, and the kernel hands out the next one page by page,
each filled with zeros first. A training step allocates gigabytes in such blocks; getting pages took a third of the time
of a loss over 32,768 ids (LOG.md). Kept in the process, a block is simply used again.

A page is 4 KiB, unless 2 MiB are asked for. Whoever reads all weights for every token finds 500 times fewer borders, at
each of which the processor stops to look where the next page lies: a sixth of the time of a decode step (LOG.md).
"""

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # from malloc.h
_LARGEST_BLOCK = 2**25  # that glibc will not hand to the kernel at once, if blocks of some size still are
_keeps_all = False  # what a training in this process has asked for


def keep_freed_memory(most: int | None = None) -> bool:
    """Asks glibc to keep what is freed: all of it, or at most so many bytes, and then only of blocks up to 32 MiB.

    Returns whether it will: elsewhere (macOS, musl, Windows) nothing changes. Where all is kept already, it stays so.
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


_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # from linux/mman.h


def use_large_pages(tensor: "Tensor", now: bool = True) -> bool:
    """Asks Linux to keep a tensor in large pages: what will be written, and `now` all of it. It stays where it is.

    Returns whether it will. Elsewhere, for small tensors, and `now` before Linux 6.1, it will not.
    """
    try:
        page = int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
        madvise = ctypes.CDLL(None).madvise
    except (OSError, ValueError, AttributeError):
        return False
    begin = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes) // page * page - begin
    if size <= 0:
        return False
    whole = ctypes.c_void_p(begin), ctypes.c_size_t(size)
    return madvise(*whole, _MADV_HUGEPAGE) == 0 and (not now or madvise(*whole, _MADV_COLLAPSE) == 0)
