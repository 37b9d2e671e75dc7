"""Speculative decoding: the model's own tokens, by fewer calls, for as long as that pays."""

from collections import Counter
from itertools import product

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.infer import speculative
from clockhand.infer.generate import generate, stream
from clockhand.infer.sampling import draw_numbers, look_up, next_token_probabilities
from clockhand.infer.scorer import PlainScorer, StepScorer, scorer_for
from clockhand.infer.settings import GREEDY, PLAIN, Sampling
from clockhand.infer.speculative import ModelDrafter, NgramDrafter, Payoff, Speculation, speculative_pieces
from clockhand.model.transformer import Transformer

KINDS = {
    "llama": {},
    "moe": dict(n_experts=4, n_experts_per_token=2),
    "dynamic rope": dict(rope_scaling="dynamic", rope_factor=4.0, rope_original_max_seq_len=4),
    "sliding window": dict(sliding_window=5),
}


def small_model(seed=0, vocab_size=64, **changes):
    defaults = dict(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=300, init_std=0.3)
    torch.manual_seed(seed)
    return Transformer(ModelConfig(vocab_size=vocab_size, tie_embeddings=False, **{**defaults, **changes})).eval()


class Knows:
    """Proposes the continuation it was told, with `wrong` (a set of places in the text) spoilt."""

    def __init__(self, text, wrong=()):
        self.text, self.wrong = text, wrong

    def propose(self, ids, prompt_length, most):
        places = range(len(ids), min(len(ids) + most, len(self.text)))
        return [(self.text[n] + (n in self.wrong)) % 64 for n in places], None


class Clock:
    """One second a look: a round costs as much as a plain step, so that every accepted id is won."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def plain(model, prompt, sampling=GREEDY, **options):
    return generate(model, [prompt], sampling, **options)[0].ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["always", "never", "sometimes"])
def test_greedy_ids_are_those_of_plain_decoding_whether_drafts_are_accepted_or_not(kind, how):
    model, prompt = small_model(**KINDS[kind]), [3, 1, 4]
    expected = plain(model, prompt, max_new_tokens=120)
    text = prompt + expected
    wrong = {"always": (), "never": range(200), "sometimes": range(0, 200, 4)}[how]
    run = Speculation(
        model=model, prompt=prompt, drafter=Knows(text, wrong), sampling=GREEDY, max_new_tokens=120, clock=Clock()
    )
    assert list(run) == expected
    stats = run.statistics
    assert stats.rounds > 0
    if how == "always":
        assert stats.accepted == stats.drafted
        assert stats.rounds + stats.plain_steps < 120 / 4
    elif how == "never":
        assert stats.accepted == 0
    else:
        assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_checks_drafts_as_the_plain_model_does(kind):
    model, prompt = small_model(**KINDS[kind]), [3, 1, 4]
    text = plain(model, prompt, max_new_tokens=90)
    assert type(scorer_for(model, 93)) is StepScorer
    wrong = range(10, 100, 7)
    for drafter in (Knows(prompt + text, wrong), ModelDrafter(small_model(seed=1, **KINDS[kind]), GREEDY)):
        run = Speculation(
            model=model, prompt=prompt, drafter=drafter, sampling=GREEDY, max_new_tokens=90, clock=Clock()
        )
        assert list(run) == text
        assert run.statistics.rounds > 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_scores_every_id_and_forgets_what_is_cut_off(kind):
    model, ids = small_model(**KINDS[kind]), [3, 1, 4, 1, 5, 9, 2, 6]
    ways = PlainScorer(model, 8), StepScorer(model, 8)
    for way in ways:
        way.extend(ids[:3])
        way.score([7, 7])
        way.truncate(3)
        way.extend(ids[3:4])
    torch.testing.assert_close(*(way.score(ids[4:]) for way in ways), rtol=1e-4, atol=1e-4)
    assert [way.length for way in ways] == [8, 8]


def test_a_plain_speculation_takes_the_reference():
    assert type(scorer_for(small_model(), 8, plain=True)) is PlainScorer


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5)])
def test_both_drafters_leave_greedy_text_as_it_is(sampling):
    model, prompt = small_model(), [5, 6, 7, 5, 6, 7, 5, 6]
    expected = plain(model, prompt, sampling, max_new_tokens=60)
    for drafter in (
        NgramDrafter(shortest=1),
        ModelDrafter(small_model(seed=1), sampling),
        ModelDrafter(model, sampling),
    ):
        run = Speculation(
            model=model, prompt=prompt, drafter=drafter, sampling=sampling, max_new_tokens=60, clock=Clock()
        )
        assert list(run) == expected
        assert run.statistics.drafted > 0
    assert run.statistics.accepted == run.statistics.drafted  # a model agrees with itself


def test_end_tokens_lengths_and_unknown_ids_are_as_in_plain_decoding():
    model, prompt = small_model(), [9, 9, 9]
    text = plain(model, prompt, max_new_tokens=100)
    for options in (
        dict(max_new_tokens=1),
        dict(max_new_tokens=100, stop_ids=[text[50]]),
        dict(max_new_tokens=100, stop_ids=[text[5]], min_new_tokens=20),
        dict(max_new_tokens=1000),  # the context ends it
    ):
        expected = plain(model, prompt, **options)
        run = Speculation(model=model, prompt=prompt, drafter=Knows(prompt + text), sampling=GREEDY, **options)
        assert list(run) == expected
    run = Speculation(model=model, prompt=prompt, drafter=Knows(prompt + text), known_ids=10, max_new_tokens=50)
    assert max(run) < 10


@pytest.mark.parametrize(
    "options",
    [
        dict(max_new_tokens=40),
        dict(max_new_tokens=0),
        dict(max_new_tokens=1000),
        dict(max_new_tokens=60, stop_strings=["\x7f", "e"]),
        dict(max_new_tokens=60, stop_strings=["e"], min_new_tokens=30),
        dict(max_new_tokens=60, stop_ids=range(0, 256, 8)),
    ],
)
def test_the_pieces_are_those_of_plain_streaming(options):
    tokenizer = Tokenizer.train([], kind="byte")
    model, prompt = small_model(vocab_size=tokenizer.vocab_size, max_seq_len=100), [100, 101, 102]
    expected = list(stream(model, [prompt], GREEDY, tokenizer=tokenizer, **{"stop_ids": [], **options}))
    stop_strings = options.pop("stop_strings", ())
    run = Speculation(model=model, prompt=prompt, drafter=NgramDrafter(shortest=1), sampling=GREEDY, **options)
    assert list(speculative_pieces(run, tokenizer, stop_strings)) == expected


class Draws:
    """Draws from a distribution of its own, whatever the text."""

    def __init__(self, seed, says=None):
        self.q = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0])
        self.says = self.q if says is None else says
        self.generator = torch.Generator().manual_seed(1000 + seed)

    def propose(self, ids, prompt_length, most):
        drawn = torch.multinomial(self.q, most, replacement=True, generator=self.generator).tolist()
        return drawn, self.says.expand(most, -1)


def test_a_draft_is_drawn_with_other_numbers_than_it_is_accepted_with_where_both_have_one_seed():
    """The first 200 draws of a drafter, as positions on its line of probabilities, against the seed's own numbers."""
    model = small_model(vocab_size=5)
    drafter = ModelDrafter(model, PLAIN, seed=7)
    same = ModelDrafter(model, PLAIN, seed=7)
    own = torch.Generator().manual_seed(7)
    drawn, again, numbers = [], [], []
    for _ in range(200):
        id, q = drafter.propose([1], 1, 1)
        drawn += id
        again += same.propose([1], 1, 1)[0]
        numbers += look_up(q, draw_numbers([own])).tolist()
    assert drawn == again
    assert sum(a == b for a, b in zip(drawn, numbers)) < 120  # all 200 with the same numbers, some 40 of 200 by chance


@pytest.mark.parametrize("honest", [True, False])
def test_sampled_tokens_have_the_distribution_of_the_model_alone(monkeypatch, honest):
    """Chi-squared over the 25 pairs of the two tokens that the first draft decides, 700 texts.

    24 degrees of freedom pass 51.2 once in 1,000; the seeds are fixed. The control is a drafter that says it draws
    evenly and does not: then the sum is beyond any doubt.
    """
    monkeypatch.setattr(Payoff, "PLAIN_STEPS", 0)
    model = small_model(vocab_size=5, d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, d_ff=8, init_std=0.5)
    sampling, prompt, texts = Sampling(temperature=1.5, top_k=4), [1, 2], 700
    says = None if honest else torch.full((5,), 0.2)
    counts: Counter = Counter()
    for seed in range(texts):
        run = Speculation(
            model=model, prompt=prompt, drafter=Draws(seed, says), sampling=sampling, max_new_tokens=4, seed=seed
        )
        first, *pair, _ = run
        counts[first, *pair] += 1

    def after(ids):
        return next_token_probabilities(model(torch.tensor([ids])).logits[:, -1].detach(), [ids], sampling)[0].tolist()

    expected: Counter = Counter()
    for a, b, c in product(range(5), repeat=3):
        expected[b, c] += texts * after(prompt)[a] * after([*prompt, a])[b] * after([*prompt, a, b])[c]
    seen: Counter = Counter()
    for (_, b, c), count in counts.items():
        seen[b, c] += count
    assert all(expected[pair] > 0 for pair in seen)
    cells = [pair for pair in expected if expected[pair] >= 5]
    chi_squared = sum((seen[pair] - expected[pair]) ** 2 / expected[pair] for pair in cells)
    assert len(cells) > 15
    assert (chi_squared < 51.2) is honest, chi_squared


def test_ngrams_propose_what_followed_the_longest_and_latest_equal_end():
    drafter = NgramDrafter(longest=3, shortest=2)
    assert drafter.propose([1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3], 0, 2) == ([4, 9], None)  # three ids beat the later two
    assert drafter.propose([2, 3, 4, 2, 3, 5, 2, 3], 0, 3) == ([5, 2, 3], None)  # the later of two
    assert drafter.propose([1, 2, 3, 4], 0, 5) == ([], None)
    assert drafter.propose([1, 5, 1], 0, 5) == ([], None)  # one id is too little


def test_a_draft_longer_than_what_followed_follows_itself():
    assert NgramDrafter().propose([7, 1, 2, 1, 2], 0, 5) == ([1, 2, 1, 2, 1], None)
    assert NgramDrafter().propose([9, 9, 9], 0, 4) == ([9, 9, 9, 9], None)


@pytest.mark.parametrize("seed", range(5))
def test_ngrams_are_found_as_a_search_from_the_end_finds_them(seed):
    def searched(ids):
        for length in (3, 2):
            for start in range(len(ids) - length - 1, -1, -1):
                if ids[start : start + length] == ids[-length:]:
                    return ids[start + length]
        return None

    ids = torch.randint(4, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
    drafter = NgramDrafter(longest=3, shortest=2)
    for end in [*range(1, 60, 3), 20, 21, 60]:  # one text as it grows, cut back, and grown again
        text = ids[:end] if end != 21 else [*ids[:19], 3, 3]
        assert drafter.propose(text, 0, 1)[0] == ([] if searched(text) is None else [searched(text)])


def test_a_drafting_model_takes_room_as_the_text_grows_and_drafts_as_before(monkeypatch):
    """Room for a context of 32,768 tokens, two slots of it and all written to, was gigabytes for a text of ten."""
    drafter, ids = ModelDrafter(small_model(max_seq_len=90), GREEDY), [3, 1, 4]
    monkeypatch.setattr(speculative, "FIRST_REACH", 8)
    reaches = []
    monkeypatch.setattr(
        speculative, "scorer_for", lambda model, reach, **kw: reaches.append(reach) or PlainScorer(model, reach)
    )
    expected = plain(drafter.model, ids, max_new_tokens=87)
    for n in range(85):
        assert drafter.propose(ids + expected[:n], 3, 3)[0] == expected[n : n + 3]
    assert reaches == [12, 26, 54, 90]


# When it pays


def judged(rounds_cost, tokens):
    payoff = Payoff()
    for _ in range(Payoff.PLAIN_STEPS):
        assert not payoff.wants_draft
        payoff.plain(1.0)
    for _ in range(Payoff.TRIAL):
        assert payoff.wants_draft
        payoff.drafted(rounds_cost, tokens)
    return payoff


def test_drafting_goes_on_where_a_token_costs_less_by_it_and_rests_where_it_costs_more():
    assert judged(rounds_cost=1.9, tokens=2).wants_draft
    assert not judged(rounds_cost=2.1, tokens=2).wants_draft


def test_drafting_is_tried_again_after_a_pause_that_doubles_until_it_pays():
    payoff = judged(rounds_cost=3.0, tokens=1)
    for pause in (32, 64):
        for _ in range(pause):
            assert not payoff.wants_draft
            payoff.plain(1.0)
        for _ in range(Payoff.TRIAL):
            assert payoff.wants_draft
            payoff.drafted(3.0, 1)
    assert payoff.switched_off == 3


def test_a_drafter_that_is_never_right_is_hardly_asked():
    model, prompt = small_model(), [3, 1, 4]
    expected = plain(model, prompt, max_new_tokens=200)

    class Costs(Knows):
        def propose(self, *arguments):
            clock.now += 0.5
            return super().propose(*arguments)

    clock = Clock()
    drafter = Costs(prompt + expected, range(300))
    run = Speculation(model=model, prompt=prompt, drafter=drafter, sampling=GREEDY, max_new_tokens=200, clock=clock)
    assert list(run) == expected
    assert run.statistics.switched_off >= 2
    assert run.statistics.rounds <= 3 * Payoff.TRIAL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(prompt=[]), "a prompt of 0 ids must have from 1 to 300"),
        (dict(draft_length=0), "draft_length = 0 must be from 1"),
        (dict(max_new_tokens=-1), "max_new_tokens = -1 must be from 0"),
        (dict(stop_ids=[64]), "end token 64 is outside the vocabulary of 64 ids"),
        (
            dict(drafter=ModelDrafter(small_model(vocab_size=32))),
            "draft model has 32 ids, but must have the model's 64",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_drawn(changes, message):
    with pytest.raises(ClockhandError, match=message):
        Speculation(**{"model": small_model(), "prompt": [1], "drafter": NgramDrafter(), "sampling": PLAIN, **changes})
