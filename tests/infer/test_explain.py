"""What --explain tells is what happened, and telling it changes nothing."""

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.infer.explain import as_json, render
from clockhand.infer.generate import generate
from clockhand.infer.sampling import look_up
from clockhand.infer.settings import GREEDY, PLAIN, Sampling
from clockhand.model.transformer import Transformer

EVERYTHING = Sampling(
    temperature=1.5,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.1,
    logit_bias={70: 2.0},
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([], kind="byte")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=280, d_model=32, n_layers=2, n_heads=2, d_ff=48, init_std=0.3, tie_embeddings=False)
    return Transformer(config).eval()


@pytest.mark.parametrize("sampling", [PLAIN, GREEDY, EVERYTHING], ids=["plain", "greedy", "everything"])
def test_an_explained_text_is_the_text(model, tokenizer, sampling):
    options = dict(tokenizer=tokenizer, max_new_tokens=12, min_new_tokens=4, seed=3)
    silent = generate(model, [[70], [71, 72]], sampling, **options)
    explained = generate(model, [[70], [71, 72]], sampling, explain=True, **options)
    assert [each.ids for each in explained] == [each.ids for each in silent]
    assert all(each.explanations is None for each in silent)
    assert [[why.id for why in each.explanations] for each in explained] == [each.ids for each in silent]


def test_the_columns_are_the_stages_that_are_on_and_the_last_is_what_was_drawn_from(model, tokenizer):
    options = dict(tokenizer=tokenizer, max_new_tokens=8, min_new_tokens=2, explain=True, stop_ids=[1])
    [completion] = generate(model, [[70]], EVERYTHING, **options)
    names = [stage.name for stage in completion.explanations[0].stages]
    penalties = ["repetition_penalty", "presence_penalty", "frequency_penalty"]
    kept = ["top_k", "top_p", "min_p", "typical_p"]
    assert names == ["model", "allowed", "logit_bias", *penalties, "temperature", *kept]
    for number, why in enumerate(completion.explanations):
        stages = {stage.name: stage for stage in why.stages}
        assert stages["model"].candidates == 280
        assert stages["allowed"].candidates == (260 if number < 2 else 261)  # the end token is held back twice
        assert stages["top_k"].candidates == 40
        counts = [stage.candidates for stage in why.stages]
        assert counts == sorted(counts, reverse=True)
        assert stages["temperature"].entropy > stages["frequency_penalty"].entropy  # 1.5 flattens
        low, high = why.interval
        assert low <= why.number < high
        drawn = why.ids.index(why.id)
        assert high - low == pytest.approx(stages["typical_p"].probabilities[drawn], abs=1e-6)


def test_entropy_and_probabilities_are_those_of_the_logits(model):
    [completion] = generate(model, [[70]], PLAIN, max_new_tokens=1, explain=True)
    [why] = completion.explanations
    probabilities = model(torch.tensor([[70]])).logits[0, -1].detach().double().softmax(-1)
    [stage] = why.stages
    assert (stage.name, stage.candidates) == ("model", 280)
    assert stage.entropy == pytest.approx(float(-(probabilities * probabilities.log()).sum()), abs=1e-4)
    assert stage.probabilities == pytest.approx([float(probabilities[id]) for id in why.ids], abs=1e-6)
    assert set(probabilities.topk(5).indices.tolist()) <= set(why.ids)
    assert look_up(probabilities[None].float(), torch.tensor([why.number])).item() == why.id


def test_the_table_and_the_json_say_the_same(model, tokenizer):
    sampling = Sampling(temperature=0.8, top_k=3)
    [completion] = generate(model, [[70]], sampling, tokenizer=tokenizer, max_new_tokens=1, explain=True)
    [why] = completion.explanations
    table, facts = render(why, tokenizer), as_json(why, tokenizer)
    head, candidates, _, *rows, last = table.splitlines()
    assert head.split() == ["model", "allowed", "temperature", "0.8", "top_k", "3"]
    assert candidates.split() == ["candidates", "280", "261", "261", "3"]
    assert [stage["candidates"] for stage in facts["stages"]] == [280, 261, 261, 3]
    assert len(rows) == len(facts["candidates"])
    assert [row.startswith(">") for row in rows] == [each["id"] == why.id for each in facts["candidates"]]
    assert f"drawn {why.number:.4f}: id {why.id} " in last
    assert rows[-1].endswith("-")  # of the model's best five, two were not among the three
