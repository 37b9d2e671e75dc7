"""The training bench: every contestant in a process of its own, and numbers that hang together."""

import pytest

from clockhand.bench import experts
from clockhand.bench import train as bench
from clockhand.bench.measure import Limits
from clockhand.count import active_parameters
from clockhand.errors import ClockhandError

SMALL = dict(vocab_size=64, n_layers=1, d_model=32, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=64)


@pytest.mark.slow
def test_ours_and_the_peer_are_measured_in_turn_with_speed_memory_and_first_step(monkeypatch):
    monkeypatch.setattr(bench, "limits", lambda: Limits(10.0, 100.0, 200.0))
    monkeypatch.setattr(bench, "can_compile", lambda device: False)
    report = bench.run("mini-llama", ["transformers"], rounds=2, batch_size=2, seq_len=16, **SMALL)
    told = report.as_json()
    assert list(told["results"]) == ["clockhand bf16", "clockhand fp32", "transformers bf16", "transformers fp32"]
    for name, each in told["results"].items():
        assert each["tok_per_s"]["median"] > 0
        assert len(each["tok_per_s"]["values"]) == 2
        assert each["peak_bytes"] > 2**20
        assert each["first_step_seconds"] > 0
        wall = 100e9 if name.endswith("fp32") else 200e9
        expected = each["tok_per_s"]["median"] * told["flops_per_token"] / wall
        assert each["matmul_share"] == pytest.approx(expected)
    assert told["results"]["clockhand bf16"]["ratio"] == 1
    assert len(list(report.lines())) == 2 + 4


def test_a_sequence_beyond_the_model_is_refused_before_anything_is_measured():
    with pytest.raises(ClockhandError, match=r"needs 4096 tokens, but mini-llama has max_seq_len = \d+"):
        bench.run("mini-llama", [], seq_len=4096)


def broken(model, config):
    raise ValueError("no such luck")


def test_a_contestant_that_fails_is_named():
    process = bench._Process("clockhand", broken, bench.build("mini-llama", **SMALL), None)
    try:
        with pytest.raises(ClockhandError, match="clockhand: ValueError: no such luck"):
            process.step()
        process._child.kill()
        process._child.join()
        with pytest.raises(ClockhandError, match="ended with code -9"):
            process.step()
    finally:
        process.end()


def test_experts_are_measured_beside_their_dense_twin_and_with_twice_as_many(monkeypatch):
    """No step is taken: what is measured is told from who is asked to be."""
    told = {}
    monkeypatch.setattr(experts, "measure", lambda preset, work, rounds, first: told.update(work) or first)
    assert experts.run("minimind-3-moe", []) == "dense"
    models = {name: model for name, (_, model, _) in told.items()}
    assert [model.n_experts for model in models.values()] == [0, 4, 8]
    active = [active_parameters(model) for model in models.values()]
    assert active[1:] == pytest.approx([active[0]] * 2, rel=0.001)
    assert len({config for _, _, config in told.values()}) == 1
    with pytest.raises(ClockhandError, match="preset = tiny has no dense twin of as many active parameters"):
        experts.run("tiny", [])
