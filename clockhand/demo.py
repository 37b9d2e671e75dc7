"""The whole way in a few minutes: text, tokenizer, model, and a scene that nobody wrote.

It does nothing that `clockhand train` and `clockhand generate` could not do; it only chooses the numbers, and says what
is happening.
"""

import sys
import time
from pathlib import Path

from clockhand.data.tokenizer import Tokenizer
from clockhand.infer.generate import prompt_ids, stream
from clockhand.infer.settings import Sampling
from clockhand.inspection import short
from clockhand.interop.hf import load_model
from clockhand.train.config import TrainConfig
from clockhand.train.loop import train
from clockhand.train.pretrain import corpus_for, model_config_for
from clockhand.train.progress import make_reporter

PRESET = "tiny"
STEPS = 1150
PROMPT = "ROMEO:\nWhat light is this"
SAMPLING = Sampling(temperature=0.8, top_p=0.95)


def recipe(steps: int, seed: int) -> TrainConfig:
    """What was found to learn most in two to three minutes on two CPU cores (LOG.md)."""
    return TrainConfig(
        steps=steps,
        seed=seed,
        batch_size=6,
        seq_len=192,  # as long as the scene: beyond the trained length it would come apart (LOG.md)
        dtype="float32",  # and not compiled: alike on every machine, and nothing to wait for
        compile="off",
        learning_rate=3e-3,
        warmup_steps=min(100, steps // 10),
        eval_every=max(steps // 8, 1),
        sample_every=max(steps // 2, 1),  # before, halfway, after
        sample_prompt=PROMPT,
        sample_tokens=60,
    )


def run(out: Path, steps: int | None = None, seed: int = 0) -> None:
    """Trains in the run folder `out` (again: goes on, or only writes), prints a scene to stdout, the rest to stderr."""
    began = time.monotonic()
    config = recipe(STEPS if steps is None else steps, seed)
    corpus = corpus_for(["builtin:shakespeare"], out, PRESET, {}, seed=seed)
    parts = {name: corpus.split(name) for name in ("train", "val")}
    say(
        f"Shakespeare's plays: {corpus.split('train').text_bytes / 1e6:.1f} MB of text became "
        f"{parts['train'].n_tokens:,} tokens of a vocabulary of {corpus.tokenizer.vocab_size:,}; "
        f"{parts['val'].n_tokens:,} more are held out."
    )
    model_config = model_config_for(PRESET, {}, corpus.tokenizer)
    say(
        f"The model '{PRESET}' has {model_config.n_layers} layers of width {model_config.d_model}. At first it knows "
        "nothing; watch the loss, and what it makes of the same few words.\n"
    )
    result = train(model_config, config, corpus, out, make_reporter())

    model, tokenizer = load_model(out / "final").eval(), Tokenizer.load(out / "final")
    say(
        f"\nA model of {short(sum(weight.numel() for weight in model.parameters()))} parameters that has seen "
        f"{short(config.steps * config.tokens_per_step)} tokens: validation loss {result.loss:.3f} nats per token, "
        f"{result.bits_per_byte:.3f} bits per byte, after {time.monotonic() - began:.0f} seconds. It writes:\n"
    )
    print(PROMPT, end="")
    options = {"tokenizer": tokenizer, "max_new_tokens": 180, "seed": seed}
    for piece in stream(model, [prompt_ids(tokenizer, PROMPT)], SAMPLING, **options):  # type: ignore[arg-type]
        print(piece.text, end="", flush=True)
    say(
        f"""

The model is in {out / "final"}, a folder that transformers opens as it is. Next:

  clockhand generate {out} --prompt "JULIET:" --temperature 0.8
  clockhand inspect {out}
  clockhand inspect mini-llama minimind-3
  clockhand train --data YOUR-TEXT --preset tiny --steps 500"""
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
