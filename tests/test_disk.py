"""Whatever is written is whole or absent, and what was there before is only gone when the new one is there."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from clockhand.disk import new_file, new_folder, remove_leftovers, remove_leftovers_of, write_text
from clockhand.errors import ClockhandError


def everything_in(root):
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_new_folder_takes_the_place_of_the_old_one_whole(tmp_path):
    for text in ("first", "second"):
        with new_folder(tmp_path / "model") as unfinished:
            (unfinished / "weights").write_text(text)
        assert everything_in(tmp_path) == {"model/weights": text}


def test_an_error_in_the_middle_leaves_the_old_folder_and_nothing_else(tmp_path):
    write_text(tmp_path / "model" / "weights", "old")
    with pytest.raises(KeyError), new_folder(tmp_path / "model") as unfinished:
        (unfinished / "weights").write_text("half")
        raise KeyError
    assert everything_in(tmp_path) == {"model/weights": "old"}


def test_a_full_disk_is_one_clear_line_and_changes_nothing(tmp_path):
    write_text(tmp_path / "log", "old")
    refusal = r"^cannot write '.*log': No space left on device; what was there before is whole"
    with pytest.raises(ClockhandError, match=refusal), new_file(tmp_path / "log") as unfinished:
        unfinished.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert everything_in(tmp_path) == {"log": "old"}


def test_a_full_disk_within_a_folder_being_written_names_the_folder_that_people_know(tmp_path):
    refused, best = pytest.raises(ClockhandError), tmp_path / "best"
    with refused as refusal, new_folder(best) as outer, new_folder(outer), new_file(outer / "config.json"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    named = f"cannot write '{best / 'config.json'}': No space left on device"
    assert str(refusal.value).startswith(named)


def test_a_process_that_died_before_the_exchange_leaves_the_old_folder(tmp_path):
    write_text(tmp_path / "model" / "weights", "old")
    write_text(tmp_path / ".unfinished-9-model" / "model" / "weights", "half")
    write_text(tmp_path / ".log.unfinished-9", "half")
    remove_leftovers(tmp_path)
    assert everything_in(tmp_path) == {"model/weights": "old"}


def test_a_process_that_died_within_the_exchange_leaves_the_new_folder(tmp_path):
    """Between the two renames neither is in place; the new one is whole by then."""
    write_text(tmp_path / ".unfinished-9-model" / "model" / "weights", "new")
    write_text(tmp_path / ".unfinished-9-model" / ".replaced" / "weights", "old")
    remove_leftovers(tmp_path)
    assert everything_in(tmp_path) == {"model/weights": "new"}


KILLED = """
import os, signal, sys
from pathlib import Path
from clockhand.disk import new_folder
with new_folder(Path(sys.argv[1])) as unfinished:
    (unfinished / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_of_a_folder_goes_with_the_next_writing_whatever_its_number(tmp_path):
    """The number of a container's process is always the same: its leftover counted as that of a living one."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "corpus")])
    (left,) = tmp_path.iterdir()
    write_text(tmp_path / ".unfinished-9-my-corpus" / ".held", "of another folder, and dead")
    with new_folder(tmp_path / "corpus") as unfinished:
        assert not left.exists()
        remove_leftovers_of(tmp_path / "corpus")  # as another process would
        write_text(unfinished / "index.json", "new")
    assert sorted(everything_in(tmp_path).values()) == ["new", "of another folder, and dead"]


@pytest.mark.parametrize("time", range(20))
def test_threads_that_write_one_folder_at_once_leave_that_of_the_last_whole(tmp_path, time):
    """Both of two failed, and the folder was gone."""
    write_text(tmp_path / "model" / "weights", "old")
    at_once, failed = threading.Barrier(3), []

    def write(text):
        try:
            with new_folder(tmp_path / "model") as unfinished:
                at_once.wait(10)
                (unfinished / "weights").write_text(text)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(str(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    (text,) = everything_in(tmp_path).values()
    assert text in ("0", "1", "2")


WRITES = """
import sys
from pathlib import Path
from clockhand.disk import new_folder
for _ in range(30):
    with new_folder(Path(sys.argv[1])) as unfinished:
        (unfinished / "weights").write_text("whole")
"""


def test_processes_that_write_one_folder_at_once_leave_it_whole(tmp_path):
    both = [subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path / "model")]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert everything_in(tmp_path) == {"model/weights": "whole"}
