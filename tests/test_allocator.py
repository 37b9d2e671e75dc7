"""Freed memory is kept, which nobody can see but the clock and the kernel."""

import platform
import resource
import subprocess
import sys

import pytest

PAGES = """
import resource, torch, sys
if sys.argv[1] == "keep":
    from clockhand.allocator import keep_freed_memory
    assert keep_freed_memory()
for _ in range(20):  # the heap settles
    torch.ones(2**24)  # 64 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
def test_the_kernel_is_asked_for_the_pages_of_a_freed_tensor_only_once():
    def faults(how: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", PAGES, how], text=True))

    pages = 10 * 2**26 // resource.getpagesize()
    kept, given_back = faults("keep"), faults("give back")
    assert kept < given_back / 20
    assert given_back > pages / 600  # the control; the kernel may hand out pages of 2 MiB
