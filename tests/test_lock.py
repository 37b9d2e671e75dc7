"""A lock keeps other processes out as long as its own lives."""

import subprocess
import sys
import threading
import time

from clockhand import lock
from clockhand.lock import release, take

HOLD = (
    "import sys, pathlib; from clockhand.lock import take; print(take(pathlib.Path(sys.argv[1])), flush=True); input()"
)


def other_process(path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=-1, stdout=-1, text=True)
    return holder, holder.stdout.readline().strip()


def test_who_comes_second_is_told_until_the_first_dies(tmp_path):
    path = tmp_path / ".lock"
    holder, took = other_process(path)
    assert took == "True"
    assert not take(path)
    holder.kill()
    holder.communicate()
    assert take(path)
    release(path)


def test_it_is_ours_as_often_as_we_ask_and_then_anybody_s(tmp_path):
    path = tmp_path / ".lock"
    assert take(path)
    assert take(path)
    holder, took = other_process(path)
    assert took == "False"
    holder.communicate("")
    release(path)
    holder, took = other_process(path)
    assert took == "True"
    holder.communicate("")


def test_who_only_asks_keeps_nobody_out(tmp_path, monkeypatch):
    """Asking has the lock for an instant, here a long one."""
    path, asks = tmp_path / ".lock", threading.Event()
    path.touch()
    real = lock._lock

    def slow(file) -> None:
        real(file)
        if threading.current_thread() is asker:
            asks.set()
            time.sleep(lock.PATIENCE / 3)

    monkeypatch.setattr(lock, "_lock", slow)
    asker = threading.Thread(target=lock.is_held, args=[path])
    asker.start()
    asks.wait()
    assert not lock._take_now(path), "control: without patience it is refused"
    assert take(path)
    release(path)
    asker.join()
