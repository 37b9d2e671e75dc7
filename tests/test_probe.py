"""What a probe may cost: `dtype auto` once took 43 seconds on a processor that multiplies bf16 by emulation."""

import time

import pytest
import torch

from clockhand import probe


def test_a_probe_stops_growing_where_products_are_slow(monkeypatch):
    """At 0.5 GFLOP/s, as bf16 is emulated, the next size is left out when it would take too long."""
    sizes, now = [], 0.0
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now)

    def emulated(work, device, until):
        nonlocal now
        size = work().shape[0]
        sizes.append(size)
        seconds = 2 * size**3 / 0.5e9
        now += seconds
        return seconds

    monkeypatch.setattr(probe, "_best", emulated)
    assert probe.matmul_flops(torch.bfloat16) == pytest.approx(0.5e9)
    assert sizes == [64, 128]
    assert now < probe.LIMIT


def test_a_slow_product_is_not_repeated(monkeypatch):
    calls = []

    def work():
        calls.append(1)
        time.sleep(0.002)

    probe._best(work, torch.device("cpu"), until=time.perf_counter())
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_probe_takes_a_fraction_of_a_second(dtype):
    probe.matmul_flops(dtype)  # what torch does once
    started = time.perf_counter()
    assert probe.matmul_flops(dtype) > 0
    assert time.perf_counter() - started < 10 * probe.LIMIT
