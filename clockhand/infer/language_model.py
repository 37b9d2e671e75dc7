"""A model and its tokenizer as one thing to call: text in, text out.

    lm = clockhand.load("runs/notes")
    print(lm.generate("Once", temperature=0.8, max_new_tokens=40))
    for piece in lm.stream("Once"):
        print(piece, end="", flush=True)

Options are the fields of `Sampling` (temperature, top_p, ...) and of `Options` (max_new_tokens, stop_strings, seed,
...), by their names. What comes back is a `Text`: a string that also knows its ids, why it ended and, where they were
asked for, its logprobs.

Any number of threads may use one `LanguageModel` at once, and each gets the text it would get alone: a call keeps its
cache, its draws and its text to itself, and changes nothing that is shared. They take turns on the machine's cores.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from clockhand.config import ModelConfig, field_names
from clockhand.count import total_parameters
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError, unknown_name
from clockhand.infer.generate import Options, generate_text, prompt_ids, stream
from clockhand.infer.kernels.library import library
from clockhand.infer.kernels.weights import drop_weights, step_precision
from clockhand.infer.logprobs import TokenLogprob, token_logprobs
from clockhand.infer.routes import Route, route_of
from clockhand.infer.settings import Sampling
from clockhand.infer.stretch import stretched
from clockhand.interop.hf import end_ids, find_model_folder, load_model
from clockhand.model.packed import check_precision, packed, precision_of
from clockhand.model.transformer import Transformer
from clockhand.presets import PRESETS, VOCAB_FROM_TOKENIZER, build

_SAMPLING = frozenset(field_names(Sampling))
_OPTIONS = frozenset(Options.__annotations__) - {"explain"}  # a Text has no place for it; `generate.generate` has
DEVICES = ("cpu", "cuda")
_POSITIONS_AT_ONCE = 256  # whose logits are made at a time, so that a long text does not need V floats for each token


class Text(str):
    """A string that was generated. Anything done to it as a string gives plain strings."""

    ids: list[int]
    """All that were drawn for it, with the end token if there was one."""
    finish_reason: str | None
    """stop | stop_string | length | context; None for a piece that is not the last."""
    logprobs: list[TokenLogprob] | None
    """One for each of `ids`, where they were asked for."""

    def __new__(
        cls, text: str, ids: list[int], finish_reason: str | None, logprobs: list[TokenLogprob] | None
    ) -> "Text":
        self = super().__new__(cls, text)
        self.ids, self.finish_reason, self.logprobs = ids, finish_reason, logprobs
        return self


@dataclasses.dataclass(frozen=True)
class ReadToken:
    """One token of a text that was read, not generated."""

    id: int
    piece: str
    """Its text; bytes that are no whole character as \\xNN."""
    logprob: float | None
    """In nats, given everything before it. None for the first one of a model whose texts begin with no bos token."""
    top: tuple[tuple[int, float], ...]
    """The ids the model thought best in its place with their logprobs, as many as were asked for."""


class LanguageModel:
    """A model that reads and writes text. Made by `load`."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, stop_ids: Sequence[int] | None = None) -> None:
        """`stop_ids` end a text; None means the tokenizer's end token. The model is set to evaluation, and must stay
        so while threads share it. Weights that change are seen by the next call."""
        if tokenizer.vocab_size > model.config.vocab_size:
            sizes = f"{tokenizer.vocab_size} ids, more than vocab_size = {model.config.vocab_size}"
            raise ClockhandError(f"the tokenizer has {sizes} of the model")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def __repr__(self) -> str:
        parameters = total_parameters(self.config)
        own = step_precision(self.model) if self.route.name == "step" else precision_of(self.model)
        weights = str(self.model.dtype).removeprefix("torch.") if own == "fp32" else own
        return f"<LanguageModel: {parameters:,} parameters in {weights}, {self.tokenizer.vocab_size:,} ids>"

    @property
    def route(self) -> Route:
        """The way that tokens of one text take, and why."""
        return route_of(self.model)

    @overload
    def generate(self, prompt: str, *, n: None = None, **options: Any) -> Text: ...
    @overload
    def generate(self, prompt: str, *, n: int, **options: Any) -> list[Text]: ...
    def generate(self, prompt: str, *, n: int | None = None, **options: Any) -> Text | list[Text]:
        """What follows `prompt`, without it. With `n`, a list of so many, drawn with the seeds seed, seed + 1, ..."""
        if n is None:
            return self.batch([prompt], **options)[0]
        if n < 1:
            raise ClockhandError(f"n = {n} must be at least 1")
        return self.batch([prompt] * n, **options)

    def batch(self, prompts: Sequence[str], **options: Any) -> list[Text]:
        """What follows each of `prompts`, computed together. Prompt r gets the text it gets alone with seed + r.

        At most 32 of them run at a time, and the next begins where one ends.
        """
        if isinstance(prompts, str):
            raise ClockhandError("prompts must be a list of texts; one text is for generate")
        sampling, others = self._split(options)
        return [
            Text(each.text, each.ids, each.finish_reason, each.logprobs)
            for each in generate_text(self.model, self.tokenizer, list(prompts), sampling, **others)
        ]

    def stream(self, prompt: str, **options: Any) -> Iterator[Text]:
        """A `Text` for every token drawn, as it is drawn: joined they are what `generate` gives.

        Many are empty, since a token may be part of a character, or of what may become a stop string. Settings are
        checked here, before the first piece is asked for.
        """
        sampling, others = self._split(options)
        if others.get("n", 1) != 1:
            raise ClockhandError(f"n = {others['n']} must be 1 in a stream")
        ids = [prompt_ids(self.tokenizer, prompt)]
        pieces = stream(self.model, ids, sampling, tokenizer=self.tokenizer, **others)
        return (
            Text(
                piece.text,
                [] if piece.id is None else [piece.id],
                piece.finish_reason,
                None if piece.logprob is None else [piece.logprob],
            )
            for piece in pieces
        )

    @torch.no_grad()
    def logprobs(self, text: str, top: int = 0) -> list[ReadToken]:
        """How probable the model finds each token of `text`, and the `top` ids it finds best in each place.

        Their sum is the log-probability of the text in nats. Raises `ClockhandError` for a text longer than the
        context.
        """
        ids = self.tokenizer.encode(text)
        before = self.tokenizer.encode("", bos=True)
        read = [*before, *ids]
        if len(read) > self.config.max_seq_len:
            raise ClockhandError(f"the text has {len(read)} tokens, more than max_seq_len = {self.config.max_seq_len}")
        if not 0 <= top <= self.tokenizer.vocab_size:
            raise ClockhandError(f"top = {top} must be from 0 to the {self.tokenizer.vocab_size} ids there are")
        if not ids:
            return []
        found: list[TokenLogprob] = []
        if len(read) > 1:
            hidden = self.model.hidden(torch.tensor([read[:-1]], device=self.model.device)).hidden[0]  # (T - 1, D)
            for start in range(0, len(hidden), _POSITIONS_AT_ONCE):
                part = slice(start, start + _POSITIONS_AT_ONCE)
                logits = self.model.lm_head(hidden[part])
                found += token_logprobs(logits, read[1:][part], top, self.tokenizer.vocab_size)
        unforeseen = [] if before else [ReadToken(ids[0], self._piece(ids[0]), None, ())]
        return unforeseen + [ReadToken(each.id, self._piece(each.id), each.logprob, each.top) for each in found]

    def _piece(self, id: int) -> str:
        return self.tokenizer.piece(id).decode("utf-8", "backslashreplace")

    def _split(self, options: dict[str, Any]) -> tuple[Sampling, Any]:
        """The sampling and the other options of a call. Raises `ClockhandError` for a name that is neither."""
        for name in options:
            if name not in _SAMPLING | _OPTIONS:
                raise unknown_name("option", name, _SAMPLING | _OPTIONS)
        sampling = Sampling(**{name: value for name, value in options.items() if name in _SAMPLING})
        others = {name: value for name, value in options.items() if name in _OPTIONS}
        return sampling, {"stop_ids": self.stop_ids, **others}


def load(
    path_or_preset: str | Path,
    *,
    precision: str | None = None,
    device: str = "cpu",
    tokenizer: str | Path | Tokenizer | None = None,
    seed: int | None = None,
    rope_scaling: str | None = None,
    rope_factor: float | None = None,
    inference_rope_scaling: bool = False,
    for_generation: bool = False,
) -> LanguageModel:
    """The model of a model or run folder; or of a preset, untrained, which writes noise but has every shape and cost.

    `precision` is what the matrices are kept in, fp32, bf16, int8 or int4 (default: everything as it is stored; a
    folder that `clockhand quantize` made has its own). `device` is where they lie, cpu or cuda. `tokenizer` is one, or
    where it is (default: the folder's own; for a preset that of bytes, whose 261 ids the preset must have). A preset's
    weights are drawn with `seed` (default 0), and its vocabulary is its own, or the tokenizer's where it states none. A
    preset goes before a folder of its name. With `for_generation` the matrices are held once, in the order in which the
    step reads them, where `routes.py` takes the step; `logprobs` and training need the model's own and are refused
    then. The rope settings are those of `stretch.stretched`, starting from the
    length a run was trained with.
    """
    if precision is not None:
        check_precision(precision)
    found = tokenizer if isinstance(tokenizer, Tokenizer) or tokenizer is None else Tokenizer.load(tokenizer)
    stop_ids, trained = None, None
    if str(path_or_preset) in PRESETS:
        found = found or Tokenizer.train([], kind="byte")
        model = _untrained(str(path_or_preset), found, seed or 0)
    else:
        from clockhand.train.run_folder import trained_seq_len

        if seed is not None:
            raise ClockhandError(f"seed = {seed} has no effect on a saved model; give it to generate")
        folder = _folder(path_or_preset)
        model = load_model(folder)
        if found is None:
            found, stop_ids = Tokenizer.load(folder), end_ids(folder) or None
        trained = trained_seq_len(path_or_preset)
    model = stretched(model, rope_scaling, rope_factor, inference_rope_scaling, trained)
    if precision is not None:
        model = packed(model, precision)
    model = moved(model, device)
    if for_generation and route_of(model).name == "step":
        drop_weights(model, library())
    return LanguageModel(model, found, stop_ids)


def moved(model: Transformer, device: str) -> Transformer:
    """The model on `device`, cpu or cuda, in evaluation mode.

    Raises `ClockhandError` for another device, or where there is no GPU.
    """
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ClockhandError("device = cuda, but torch finds no GPU here; use cpu")
    return model.to(device).eval()


def _folder(path: str | Path) -> Path:
    """The model folder at `path`. A word that is nothing at all may have been meant as a preset."""
    if not Path(path).exists():
        raise unknown_name("preset or folder", str(path), PRESETS)
    return find_model_folder(Path(path))


def _untrained(preset: str, tokenizer: Tokenizer, seed: int) -> Transformer:
    """The model of a preset with weights of `seed`; torch's own generator stays where it was."""
    changes = {"vocab_size": tokenizer.vocab_size} if preset in VOCAB_FROM_TOKENIZER else {}
    config = build(preset, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(config)
