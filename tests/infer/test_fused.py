"""The fused step of many streams computes what the plain one does, and is used only where it can."""

import pytest
import torch
from torch._dynamo.utils import counters

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer import fused, graphs
from clockhand.infer.chunk import ChunkGraphs
from clockhand.infer.fused import FusedRunner, best_runner, copied_bytes, is_fusible
from clockhand.infer.ordered import Unsorted, order_of
from clockhand.infer.runner import ReferenceRunner
from clockhand.infer.scheduler import Row
from clockhand.infer.weights import keep_weights
from clockhand.model.packed import packed
from clockhand.model.transformer import Transformer

SWITCHES = {
    "llama": {},
    "one kv head": dict(n_kv_heads=1),
    "all kv heads": dict(n_kv_heads=4),
    "normed queries and keys": dict(qk_norm=True),
    "biases": dict(attention_bias="all", mlp_bias=True),
    "biases of q, k and v alone": dict(attention_bias="qkv"),
    "layer norm after": dict(norm="layer", norm_position="post"),
    "gelu": dict(mlp="gelu"),
    "relu": dict(mlp="relu"),
    "no residual": dict(residual=False),
    "interleaved": dict(rope_layout="interleaved"),
    "learned positions": dict(position="learned"),
    "no positions": dict(position="none"),
    "a window": dict(sliding_window=3),
    "an untied head": dict(tie_embeddings=False),
}
NOT_FUSED = {
    "experts": dict(n_experts=2),
    "dynamic rope": dict(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=8),
}


def model(**changes):
    sizes = dict(vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=32)
    torch.manual_seed(0)
    made = Transformer(ModelConfig(**{**sizes, "init_std": 0.3, **changes})).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):  # which begin at 0, where a forgotten one would not be noticed
                parameter.normal_()
    return made


def logits(runner):
    """Of steps in which slots of different lengths take one id each, and slot 1 takes none."""
    runner.run([Row(0, [1, 2, 3, 4, 5], 0), Row(2, [6], 0)])
    return [runner.run([Row(0, [7], 5 + step), Row(2, [8 + step], 1 + step)]) for step in range(6)]


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES)
def test_the_fused_step_equals_the_plain_one(changes):
    whole = model(**changes)
    runner = best_runner(whole, 3, 32, 8, compile=False)
    assert isinstance(runner, FusedRunner)
    for got, expected in zip(logits(runner), logits(ReferenceRunner(whole, 3, 32, 8))):
        # Sums in another order, in fp32, of logits of about 10.
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", NOT_FUSED.values(), ids=NOT_FUSED)
def test_what_cannot_be_fused_runs_the_plain_way(changes):
    whole = model(**changes)
    assert not is_fusible(whole)
    assert type(best_runner(whole, 3, 32, 8)) is ReferenceRunner


def test_in_bf16_it_is_as_near_to_fp32_as_the_plain_one():
    exact = logits(ReferenceRunner(model(), 3, 32, 8))
    low = model().to(torch.bfloat16)
    errors = [
        max(float((got - want).abs().max()) for got, want in zip(logits(kind(low, 3, 32, 8)), exact))
        for kind in (FusedRunner, ReferenceRunner)
    ]
    assert errors[0] < 2 * errors[1]


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_packed_models_are_fused_too(precision):
    whole = packed(model(d_ff=64), precision)
    for got, expected in zip(logits(FusedRunner(whole, 3, 32, 8)), logits(ReferenceRunner(whole, 3, 32, 8))):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


KINDS_OF_GRAPHS = ["normed queries and keys", "layer norm after", "learned positions", "a window"]


@pytest.mark.skipif(graphs.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS_OF_GRAPHS)])
def test_one_graph_is_compiled_for_any_number_of_rows_and_length_and_equals_the_plain_step(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    whole = model(**SWITCHES[kind], max_seq_len=96)
    compiled = FusedRunner(whole, 5, 96, 8, compile=True)

    def never(*ignored):
        raise AssertionError("compiled again")

    monkeypatch.setattr(graphs, "compile_into", never)
    plain = ReferenceRunner(whole, 5, 96, 8)
    counters.clear()
    for step in range(80):  # over more than one length of 32, and past the window
        rows = [Row(slot, [(7 * step + slot) % 50], step) for slot in range(1 + 4 * (step < 60))]
        torch.testing.assert_close(compiled.run(rows), plain.run(rows), atol=1e-4, rtol=1e-4)
    assert not counters["stats"], "torch compiled something as the texts grew"
    assert FusedRunner(whole, 2, 64, 8)._graph is not None  # other sizes, the same graph, taken since it lies there


def test_a_damaged_graph_that_cannot_be_made_again_is_told_and_the_step_runs_as_it_is_written(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    monkeypatch.setattr(graphs, "compiler", lambda: None)
    whole = model()
    fused._file(whole.config, "fp32", torch.float32).write_text("damaged")
    for got, expected in zip(logits(FusedRunner(whole, 3, 32, 8)), logits(ReferenceRunner(whole, 3, 32, 8))):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert "note: compiling a step needs a C++ compiler" in capsys.readouterr().err
    with pytest.raises(ClockhandError, match="needs a C\\+\\+ compiler"):
        FusedRunner(whole, 3, 32, 8, compile=True)


@pytest.mark.slow
@pytest.mark.skipif(graphs.compiler() is None, reason="needs a C++ compiler")
def test_the_compiled_step_in_bf16_is_as_near_to_fp32_as_the_plain_one_and_picks_what_it_picks(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    exact, low = torch.cat(logits(ReferenceRunner(model(), 3, 32, 8))), model().to(torch.bfloat16)
    runners = [FusedRunner(low, 3, 32, 8, compile=True), FusedRunner(low, 3, 32, 8, compile=False)]
    assert [runner._graph is None for runner in runners] == [False, True]
    plain = torch.cat(logits(ReferenceRunner(low, 3, 32, 8)))
    error = (plain - exact).abs().max()  # what rounding to bf16 costs
    best, second = plain.topk(2).values.T
    clear = best - second > 2 * error  # no rounding decides
    assert clear.float().mean() > 0.5  # or the last line says little
    for runner in runners:
        got = torch.cat(logits(runner))
        assert (got - exact).abs().max() < 2 * error
        assert (got - plain).abs().max() < 2 * error
        assert torch.equal(got.argmax(-1)[clear], plain.argmax(-1)[clear])


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES)
def test_prompts_read_as_one_matrix_equal_those_read_alone(changes):
    whole = model(**changes)
    runners = FusedRunner(whole, 4, 32, 8, compile=False), ReferenceRunner(whole, 4, 32, 8)
    begun = [0] * 4
    for lengths in ([2, 5, 8, 0], [3, 1, 2, 4], [0, 8, 0, 0], [4, 0, 1, 7]):
        rows = [
            Row(slot, [(5 * slot + begun[slot] + n) % 50 for n in range(length)], begun[slot])
            for slot, length in enumerate(lengths)
            if length
        ]
        got, expected = (runner.run(rows) for runner in runners)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        begun = [start + length for start, length in zip(begun, lengths)]


def test_prompts_of_one_step_are_multiplied_together(monkeypatch):
    rows, real = [], fused.WithRows.product
    monkeypatch.setattr(fused.WithRows, "product", lambda self, x, matrix: rows.append(len(x)) or real(self, x, matrix))
    FusedRunner(model(), 4, 32, 8, compile=False).run([Row(0, [1] * 8, 0), Row(2, [2] * 5, 0), Row(3, [3, 4], 0)])
    assert set(rows) == {15, 3}  # tokens in the blocks, and their last ones in the head


def test_runners_of_a_model_whose_weights_are_kept_share_one_copy():
    whole = model()
    one, other = (FusedRunner(whole, 2, 32, 8, compile=False) for _ in range(2))
    assert one._weights is not other._weights  # control: they may change between the two
    keep_weights(whole)
    one, other = (FusedRunner(whole, slots, 32, 8, compile=False) for slots in (2, 5))
    assert one._weights is other._weights


def test_idle_slots_are_not_computed(monkeypatch):
    rows, real = set(), fused.WithRows.product
    monkeypatch.setattr(fused.WithRows, "product", lambda self, x, matrix: rows.add(len(x)) or real(self, x, matrix))
    runner = FusedRunner(model(), 32, 32, 8, compile=False)
    runner.run([Row(slot, [1], 0) for slot in (3, 8, 30)])
    assert rows == {3}


def test_in_fp32_the_logits_of_a_row_are_to_the_bit_those_it_has_among_any_others():
    whole = model(d_model=64, d_ff=160, max_seq_len=64)
    if isinstance(order_of(whole.config, torch.float32), Unsorted):
        pytest.skip("in F.linear the order of sums depends on the number of rows")
    alone, among = (FusedRunner(whole, 9, 64, 40, compile=False) for _ in range(2))
    prompts = [Row(slot, [slot + n for n in range(2 + 4 * slot)], 0) for slot in range(9)]
    for row, logits in zip(prompts, among.run(prompts)):
        assert torch.equal(logits, alone.run([row])[0])
    for runner in (alone, among):
        for slot in range(9):
            runner.open(slot, slot, 0, 64)
    for step in range(12):
        others = [Row(slot, [slot + step], step) for slot in range(1, 9 - step // 2)]
        row = Row(0, [step], step)
        assert torch.equal(among.run([row, *others])[0], alone.run([row])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "biases", "learned positions", "an untied head"])
def test_the_weights_it_holds_beside_the_model_are_forecast_to_the_byte(kind, dtype):
    whole = model(**SWITCHES[kind]).to(dtype)
    held = FusedRunner(whole, 3, 32, 8, compile=False)._weights.values()
    tensors = [tensor for each in held for tensor in (each if isinstance(each, list) else [each])]
    assert copied_bytes(whole) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_cannot_be_fused_is_refused_where_it_is_asked_for(name):
    with pytest.raises(ClockhandError, match="a fused step needs dense layers"):
        FusedRunner(model(**NOT_FUSED[name]), 2, 32, 8)


def test_experts_have_no_graphs_of_a_prompt():
    with pytest.raises(ClockhandError, match="n_experts = 2"):
        ChunkGraphs(model(n_experts=2).config, "fp32", torch.float32, {})
