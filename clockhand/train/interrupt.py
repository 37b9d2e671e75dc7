"""Being asked to stop: Ctrl-C and SIGTERM become a wish that the loop grants when its step is done."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """The run was asked to stop, and has saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What a shell expects: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signum


class StopRequest:
    signum: int | None = None
    """The signal that came, if one did."""


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While the block runs, the first SIGINT or SIGTERM is only noted; a second one acts as it would without us.

    Outside the main thread, where Python delivers no signals, nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    usual = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in usual.items():
            signal.signal(signum, handler)

    def remember(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        restore()
        # Not print(): the signal may have come in the middle of one.
        os.write(2, b"\nstopping after this step and a checkpoint; once more stops at once\n")

    for signum in usual:
        signal.signal(signum, remember)
    try:
        yield request
    finally:
        restore()
