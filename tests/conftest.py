"""What all tests share."""

import signal
from pathlib import Path

import pytest
import torch

# Tensors as small as the tests' gain nothing from a second thread, and on a busy machine waiting for it took 60 times
# as long as the work.
torch.set_num_threads(1)

# A shell starts background jobs with SIGINT ignored, and so would Python then; tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_DATA = Path(__file__).resolve().parents[1] / "../shared/data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of sample files beside the repository; a test that wants it is skipped where it is not at hand."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the sample files in ../shared/data")
    return SHARED_DATA
