"""From text and a preset to the two things a run is made of: a corpus and a model config.

This file knows where a run keeps its corpus, and who decides the size of the vocabulary: a tokenizer trained for a
preset aims at the preset's vocab_size, and the model has that many ids whether or not the text could fill them; only
`tiny` takes the tokenizer's own number. The loop is in `loop.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clockhand.config import ModelConfig
from clockhand.data.shards import Corpus, CorpusSettings, Progress, difference, is_corpus, prepare
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.presets import VOCAB_FROM_TOKENIZER, build, preset_settings
from clockhand.train.run_folder import open_run_folder


def corpus_for(
    sources: Sequence[str],
    out: Path,
    preset: str,
    changes: Mapping[str, Any],
    progress: Progress | None = None,
    **settings: Any,
) -> Corpus:
    """The corpus that a run in `out` trains on: a corpus folder as it is, or text made into `out`/corpus.

    A corpus already there is used again if these settings would make the same. `settings` are those of
    `CorpusSettings` that somebody asked for; a corpus folder takes none of them but the run's `seed`. Without a
    `vocab_size` the preset's is aimed at. Raises `ClockhandError`.
    """
    if len(sources) == 1 and is_corpus(sources[0]):
        for name in sorted(settings.keys() - {"seed"}):  # a run's seed decides more than what is held out
            flag = f"--{name.replace('_', '-')} {settings[name]}"
            raise ClockhandError(f"{flag} has no effect: '{sources[0]}' is a corpus, already made")
        return Corpus.open(sources[0])
    if not settings.get("tokenizer") and settings.get("kind", "bpe") == "bpe" and settings.get("vocab_size") is None:
        settings["vocab_size"] = changes.get("vocab_size", preset_settings(preset)["vocab_size"])
    wanted = CorpusSettings(sources=tuple(sources), **settings)
    open_run_folder(out)
    folder = out / "corpus"
    differs = difference(folder, wanted)
    if differs is None:
        return Corpus.open(folder)
    if is_corpus(folder) and any((out / "checkpoints").iterdir()):
        Corpus.open(folder)  # a damaged one is told as such
        raise ClockhandError(
            f"the run in {out} was started on {differs}; give the same, or another --out, or go on with --data {folder}"
        )
    return prepare(wanted, folder, progress)


def model_config_for(preset: str, changes: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> ModelConfig:
    """The preset with `changes`, and with the vocabulary that goes with `tokenizer`. Raises `ClockhandError`."""
    changes = dict(changes)
    if tokenizer is not None and "vocab_size" not in changes and preset in VOCAB_FROM_TOKENIZER:
        changes["vocab_size"] = tokenizer.vocab_size
    config = build(preset, **changes)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ClockhandError(
            f"vocab_size = {config.vocab_size} of {preset} cannot hold the tokenizer's {tokenizer.vocab_size} ids: "
            f"give --vocab-size {config.vocab_size}, or --set vocab_size={tokenizer.vocab_size}"
        )
    return config
