"""Measuring: turns are fair, medians are medians, and a limit is of the size that the machine has."""

import pytest
import torch

from clockhand.bench import measure
from clockhand.errors import ClockhandError


def test_contestants_take_turns_and_every_second_round_is_reversed():
    turns = []

    def contestant(name):
        return lambda: turns.append(name) or float(len(turns))

    result = measure.alternate({"a": contestant("a"), "b": contestant("b")}, rounds=3, warmup=1)
    assert "".join(turns) == "ba" + "ab" + "ba" + "ab"
    assert result["a"].values == (3.0, 6.0, 7.0)


def test_the_median_and_its_spread_are_told():
    measured = measure.Measured((10.0, 30.0, 20.0), "tok/s")
    assert measured.median == 20
    assert measured.spread == 1.0
    assert measured.as_json() == {"median": 20, "spread": 1.0, "unit": "tok/s", "values": [10.0, 30.0, 20.0]}


def test_no_rounds_are_refused():
    with pytest.raises(ClockhandError, match="rounds = 0 must be 1 or more"):
        measure.alternate({}, rounds=0)


def test_a_matrix_product_that_torch_makes_slower_is_told_slower():
    """Float64 has half the lanes of float32 in every vector unit: a control that the number follows the work."""
    assert measure.matmul_gflops(torch.float64, 512, 5) < measure.matmul_gflops(torch.float32, 512, 5)


def test_limits_turn_into_the_fastest_tokens_there_can_be():
    walls = measure.Limits(read_gb_per_s=50.0, fp32_gflops=200.0, bf16_gflops=800.0)
    assert walls.decode_tok_per_s(100_000_000) == 500
    assert walls.prefill_tok_per_s(1e8) == 8000
    assert walls.prefill_tok_per_s(1e8, torch.float32) == 2000


def test_the_machine_says_what_it_is_in_one_line():
    told = str(measure.machine())
    assert torch.__version__ in told
    assert "\n" not in told


def test_a_peer_nobody_knows_is_refused_with_the_nearest():
    with pytest.raises(ClockhandError, match=r"unknown peer 'llamacpp' \(from --peer\); did you mean 'llama.cpp'"):
        measure.wanted_peers("llamacpp")
    assert measure.wanted_peers("none") == []
