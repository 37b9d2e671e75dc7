"""The step in C++ equals the model, for every switch, precision, split and neighbour, on what can run here."""

import math
import threading

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.engine import Engine, Request
from clockhand.infer.generate import generate
from clockhand.infer.kernels.build import variants
from clockhand.infer.kernels.library import find_library
from clockhand.infer.kernels.runner import StepRunner, step_runner
from clockhand.infer.kernels.weights import PackedModel
from clockhand.infer.scheduler import Row
from clockhand.infer.settings import GREEDY
from clockhand.model.cache import KVCache
from clockhand.model.packed import pack, packed
from clockhand.model.transformer import Transformer

LIBRARIES = {name: find_library(name)[0] for name in variants()}
pytestmark = pytest.mark.skipif(not any(LIBRARIES.values()), reason="no library of the step: there was no C++ compiler")

SMALL = dict(vocab_size=37, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, max_seq_len=64)
KINDS = {
    "dense": dict(),
    "uneven": dict(d_model=20, d_ff=25, head_dim=6),  # nothing is a multiple of a vector
    "wide heads": dict(head_dim=64),
    "qk_norm": dict(qk_norm=True, attention_bias="qkv"),
    "multi_query": dict(n_kv_heads=1),
    "multi_head": dict(n_kv_heads=4),
    "moe": dict(n_experts=4, n_experts_per_token=2),
    "moe not renormalised": dict(n_experts=4, n_experts_per_token=2, renormalize_top_k=False, mlp_bias=True),
    "sliding_window": dict(sliding_window=5),
    "learned": dict(position="learned"),
    "no_positions": dict(position="none"),
    "no_residual": dict(residual=False),
    "post_norm": dict(norm_position="post", norm="layer", mlp="gelu"),
    "biases": dict(norm="layer", mlp="relu", mlp_bias=True, attention_bias="all", tie_embeddings=False),
    "swiglu with biases": dict(mlp_bias=True, attention_bias="all"),
    "interleaved": dict(rope_layout="interleaved"),
    "linear": dict(rope_scaling="linear", rope_factor=3.0),
    "ntk": dict(rope_scaling="ntk", rope_factor=3.0),
    "yarn": dict(rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=8, rope_theta=100.0),
    "llama3": dict(rope_scaling="llama3", rope_factor=4.0, rope_original_max_seq_len=8),
    "dynamic": dict(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=4),
}
REACH = 32


@pytest.fixture(params=[name for name, each in LIBRARIES.items() if each is not None])
def library(request):
    return LIBRARIES[request.param]


def make_model(scale: float = 0.3, **changes) -> Transformer:
    model = Transformer(ModelConfig(**{**SMALL, **changes}))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if parameter.dim() == 1 and name.endswith("weight") else noise)
    return model.eval()


def make_ids(rows: int, tokens: int) -> list[list[int]]:
    return torch.randint(0, 37, (rows, tokens), generator=torch.Generator().manual_seed(1)).tolist()


def opened(model: PackedModel, slots: int = 2, longest: int = 16) -> StepRunner:
    runner = StepRunner(model, slots, REACH, longest)
    for slot in range(slots):
        runner.open(slot, slot, 0, REACH)
    return runner


@torch.no_grad()
def by_model(model: Transformer, ids: list[list[int]]) -> torch.Tensor:
    return model(torch.tensor(ids), cache=KVCache(model.config, len(ids), REACH)).logits


def by_steps(runner: StepRunner, ids: list[list[int]]) -> torch.Tensor:
    """Two texts: read in parts of unlike sizes, in one step with a text that goes on, and then one by one."""
    logits = torch.full((2, len(ids[0]), runner._config.vocab_size), math.nan)
    logits[0, :7] = runner.score(0, ids[0][:7])
    logits[1, :3] = runner.score(1, ids[1][:3])
    both = runner.run([Row(0, ids[0][7:8], 7), Row(1, ids[1][3:8], 3)])
    logits[0, 7], logits[1, 7] = both
    for t in range(8, len(ids[0])):
        logits[:, t] = runner.run([Row(slot, ids[slot][t : t + 1], t) for slot in range(2)])
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_equals_the_model_for_every_switch(library, kind):
    """In fp32: what is left is the order of sums, 1e-5 of logits up to 10."""
    model, ids = make_model(**KINDS[kind]), make_ids(2, 19)
    got, want = by_steps(opened(PackedModel(model, "fp32", library)), ids), by_model(model, ids)
    seen = ~got.isnan()
    assert seen[0].all()
    assert seen[1, 7:].all()
    torch.testing.assert_close(got[seen], want[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "qk_norm", "biases", "interleaved"])
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("int8", 0.06), ("int4", 0.08)])
def test_a_rounded_step_is_as_near_as_its_inputs_are_rounded(library, kind, precision, tolerance):
    """The weights are those of `packed`; inputs of products are rounded too, to 8 bits: some percent of the logits."""
    model, ids = make_model(0.15, **KINDS[kind]), make_ids(2, 19)
    got, want = by_steps(opened(PackedModel(model, precision, library)), ids), by_model(packed(model, precision), ids)
    seen = ~got.isnan()
    off = (got[seen] - want[seen]).square().mean().sqrt() / want[seen].square().mean().sqrt()
    assert float(off) < tolerance


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["dense", "moe", "sliding_window", "wide heads"])
def test_a_row_gets_the_same_bits_whoever_sits_beside_it_and_however_it_is_split(library, kind, precision):
    model, ids = PackedModel(make_model(**KINDS[kind]), precision, library), make_ids(9, 12)
    alone, whole, crowd = opened(model, 1), opened(model, 1), opened(model, 9)
    one_by_one = torch.stack([alone.append(0, [id]) for id in ids[4]])
    assert torch.equal(whole.score(0, ids[4]), one_by_one)
    for t in range(12):
        logits = crowd.run([Row(slot, ids[slot][t : t + 1], t) for slot in range(9)])
        assert torch.equal(logits[4], one_by_one[t])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_in_a_cache_reaches_its_own_row_only(library, precision, value):
    model, ids = PackedModel(make_model(), precision, library), make_ids(2, 6)
    clean, dirty = opened(model), opened(model)
    for runner in (clean, dirty):
        for slot in range(2):
            runner.run([Row(slot, ids[slot], 0)])
    keys, values = dirty._cache.memory
    for tensor in (*keys, *values):
        tensor[1, :6] = value
        tensor[0, 6:] = value  # behind the end of a text there may be anything
    want, got = ([*runner.run([Row(0, [5], 6), Row(1, [5], 6)])] for runner in (clean, dirty))
    assert torch.equal(got[0], want[0])
    assert not got[1].isfinite().any()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_the_number_of_threads_changes_no_bit(library, threads):
    model, ids = PackedModel(make_model(**KINDS["moe"]), "fp32", library), make_ids(1, 12)[0]
    want, before = opened(model, 1).score(0, ids), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(opened(model, 1).score(0, ids), want)
    finally:
        torch.set_num_threads(before)


def test_a_text_that_was_cut_back_goes_on_as_if_nothing_had_been_behind(library):
    model, ids = PackedModel(make_model(), "fp32", library), make_ids(1, 12)[0]
    runner, straight = opened(model, 1), opened(model, 1)
    runner.score(0, [*ids[:5], 9, 9, 9])
    runner.truncate(0, 5)
    straight.score(0, ids[:5])
    assert torch.equal(runner.score(0, ids[5:]), straight.score(0, ids[5:]))


def test_other_threads_of_python_run_during_a_step(library):
    model = PackedModel(make_model(vocab_size=20000, d_model=256, d_ff=1024), "fp32", library)
    runner = StepRunner(model, 1, 64, 64)
    runner.open(0, 0, 0, 64)
    inside, counted = threading.Event(), []

    def count() -> None:
        while inside.is_set():
            counted.append(1)

    step = model.library.functions.step

    class Watched:
        @staticmethod
        def step(*arguments):
            counted.clear()
            result = step(*arguments)
            during.append(len(counted))
            return result

    during: list[int] = []
    inside.set()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        library_functions, model.library.functions = model.library.functions, Watched  # type: ignore[assignment]
        runner.score(0, list(range(60)))
    finally:
        model.library.functions = library_functions
        inside.clear()
        thread.join()
    assert during[0] > 100


@pytest.mark.parametrize("kind", ["dense", "moe", "dynamic", "sliding_window"])
def test_an_engine_with_the_step_draws_what_the_model_draws(kind):
    model, ids = make_model(0.15, **KINDS[kind]), make_ids(5, 7)
    want = generate(model, ids, GREEDY, max_new_tokens=10, plain=True)
    engine = Engine(model, slots=3, max_seq_len=17, make_runner=step_runner)
    numbers = [engine.submit(Request(ids=each, sampling=GREEDY, max_new_tokens=10)) for each in ids]
    drawn: dict[int, list[int]] = {number: [] for number in numbers}
    while not engine.idle:
        for event in engine.step():
            assert event.id is not None
            drawn[event.request].append(event.id)
    assert [drawn[number] for number in numbers] == [each.ids for each in want]


def test_more_than_a_slot_has_room_for_is_refused(library):
    runner = opened(PackedModel(make_model(), "fp32", library), 1)
    with pytest.raises(ClockhandError, match="at most 16 ids"):
        runner.score(0, [1] * 17)


def test_a_library_of_another_source_is_not_loaded(monkeypatch):
    from clockhand.infer.kernels import library as module

    monkeypatch.setattr(module, "source_digest", lambda: "another")
    found, why = module.find_library.__wrapped__()
    assert found is None
    assert "built from another source" in why


def test_the_step_reads_the_scales_of_int4_as_they_are_stored():
    """It has them in bf16; rounded only there, reference and step had other weights."""
    scale = pack(torch.randn(40, 96, generator=torch.Generator().manual_seed(2)), "int4").scale
    assert torch.equal(scale, scale.bfloat16().float())
