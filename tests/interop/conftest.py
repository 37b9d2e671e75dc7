"""Files get damaged: what every reader of foreign files must survive."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clockhand.errors import ClockhandError

HEADER = 600  # bytes in which damage is most interesting
MEMORY = 300 * 2**20  # far above what these small files need, far below what their damaged headers claim


@st.composite
def edits(draw: st.DrawFn, size: int) -> list[tuple[str, int, bytes]]:
    """Some (what to do, where, with which bytes)."""
    numbers = st.sampled_from([0, 1, 2, 8, 9, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])
    words = numbers.flatmap(lambda n: st.sampled_from([4, 8]).map(lambda width: n.to_bytes(8, "little")[:width]))
    place = st.one_of(st.integers(0, min(HEADER, size)), st.integers(0, size))
    what = st.sampled_from(["overwrite", "overwrite", "insert", "cut", "end"])
    return draw(st.lists(st.tuples(what, place, words | st.binary(min_size=1, max_size=12)), min_size=1, max_size=4))


def damaged(good: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for what, place, new in changes:
        if what == "overwrite":
            good = good[:place] + new + good[place + len(new) :]
        elif what == "insert":
            good = good[:place] + new + good[place:]
        elif what == "cut":
            good = good[:place] + good[place + len(new) :]
        else:
            good = good[:place]
    return good


@pytest.fixture
def survives(tmp_path: Path) -> Callable[..., None]:
    """A check that `read(path)` takes any damage to a good file as one clear refusal, or not at all.

    Anything else that is raised fails the test, and so do a jump in memory and a file that was not there before.
    """

    def check(
        read: Callable[[Path], Any],
        good: bytes,
        name: str,
        examples: int,
        whole: Callable[[bytes], bytes] = lambda content: content,  # makes a file of the damaged bytes
    ) -> None:
        path = tmp_path / name
        path.write_bytes(whole(good))
        read(path)  # good, and everything imported
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(edits(len(good)))
        def run(changes: list[tuple[str, int, bytes]]) -> None:
            path.write_bytes(whole(damaged(good, changes)))
            refusal = ""
            try:
                read(path)
            except ClockhandError as error:
                refusal = str(error)
            assert "\n" not in refusal
            assert [each.name for each in tmp_path.iterdir()] == [name]

        run()
        used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert used < MEMORY, f"a damaged file of {len(good)} bytes took {used} bytes of memory"

    return check
