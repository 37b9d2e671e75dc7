"""Freed memory is kept, which nobody can see but the clock and the kernel."""

import platform
import resource
import subprocess
import sys

import pytest

PAGES = """
import resource, torch, sys
how, size = sys.argv[1], int(sys.argv[2])
if how != "give back":
    from clockhand.allocator import keep_freed_memory
    assert keep_freed_memory(2**26 if how == "keep some" else None)
for _ in range(20):  # the heap settles
    torch.ones(size // 4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(size // 4)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, size: int = 2**26) -> int:
    return int(subprocess.check_output([sys.executable, "-c", PAGES, how, str(size)], text=True))


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")


def test_the_kernel_is_asked_for_the_pages_of_a_freed_tensor_only_once():
    pages = 10 * 2**26 // resource.getpagesize()
    kept, given_back = faults("keep"), faults("give back")
    assert kept < given_back / 20
    assert given_back > pages / 600  # the control; the kernel may hand out pages of 2 MiB


def test_asked_to_keep_some_glibc_still_gives_back_what_is_larger():
    assert faults("keep some", 2**24) < faults("keep some", 2**26) / 20


LARGE = """
import re, sys, torch
from clockhand.allocator import use_large_pages
def in_large_pages():
    return 1024 * int(re.search(r"AnonHugePages: +(\\d+)", open("/proc/self/smaps_rollup").read())[1])
before, numbers = in_large_pages(), torch.arange(2**23)  # 64 MiB
plain = in_large_pages() - before
done = use_large_pages(numbers)
assert torch.equal(numbers, torch.arange(2**23))
print(done, plain, in_large_pages() - before)
"""


def test_a_tensor_in_large_pages_is_the_same_tensor():
    done, plain, large = subprocess.check_output([sys.executable, "-c", LARGE], text=True).split()
    if done == "False":
        pytest.skip("this kernel does not do it")
    assert int(large) >= 2**25
    assert int(large) > int(plain) or int(plain) >= 2**25  # the control: some kernels do so unasked
