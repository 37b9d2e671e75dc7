"""A model that cannot fit is refused by arithmetic, before it is built."""

import pytest

from clockhand import memory
from clockhand.errors import ClockhandError
from clockhand.presets import build


def test_sixteen_bytes_a_parameter_must_fit(monkeypatch):
    config = build("tiny")
    needed = memory.total_parameters(config) * 16
    monkeypatch.setattr(memory, "total_memory", lambda: needed)
    memory.refuse_beyond_memory(config)
    monkeypatch.setattr(memory, "total_memory", lambda: needed - 1)
    with pytest.raises(ClockhandError, match=f"{memory.total_parameters(config):,} parameters needs"):
        memory.refuse_beyond_memory(config)


def test_where_nobody_says_how_much_there_is_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "total_memory", lambda: None)
    memory.refuse_beyond_memory(build("qwen3-30b-a3b"))


def test_this_machine_has_memory():
    assert (memory.total_memory() or 2**40) > 2**28
