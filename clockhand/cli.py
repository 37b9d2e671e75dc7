"""The command line: `clockhand VERB [MODEL] [flags]`.

Each verb reads its flags, calls one function of the package and prints the answer. Results go to stdout, progress to
stderr. A mistake of the user's is one line and a non-zero exit (`--debug` shows where it was noticed).

Whatever needs torch is imported inside the verb that needs it, so `clockhand --help` and `inspect` answer at once.
"""

import contextlib
import dataclasses
import functools
import inspect as python_inspect
import io
import json
import os
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from clockhand import __version__
from clockhand.bench import WORKS
from clockhand.config import ModelConfig, field_docs, field_names, parse_settings
from clockhand.errors import ClockhandError, as_command, unknown_name
from clockhand.infer.settings import Sampling
from clockhand.presets import PRESETS
from clockhand.train.config import TrainConfig
from clockhand.train.interrupt import Interrupted

if TYPE_CHECKING:
    from clockhand.data.corpora import Report
    from clockhand.data.shards import Corpus
    from clockhand.data.tokenizer import Tokenizer
    from clockhand.infer.generate import Piece
    from clockhand.model.transformer import Transformer

_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}

app = typer.Typer(
    name="clockhand",
    help="The modern decoder-only Transformer: build it, count it, train it, talk to it, prove it, take it elsewhere.",
    no_args_is_help=True,
    add_completion=False,
    context_settings=_SETTINGS,
    rich_markup_mode=None,
)
tokenizer_app = typer.Typer(help="Train a tokenizer, or look at one.", no_args_is_help=True, rich_markup_mode=None)
data_app = typer.Typer(
    help="Turn text into a corpus of tokens, and look after it.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(data_app, name="data")


# ── flags that come from the fields of a config ────────────────────────────────────────────────────────────────────


def flags_from(config_type: type, but: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a verb one flag for every field of `config_type`; it receives those that were typed as `fields`, a dict.

    Fields in `but` have a form of their own, which the verb declares.
    """
    hints, docs = typing.get_type_hints(config_type), field_docs(config_type)
    defaults = {name: field.default for name, field in config_type.__dataclass_fields__.items()}  # type: ignore[attr-defined]

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in python_inspect.signature(verb).parameters.values() if p.name != "fields"]
        flags = [
            python_inspect.Parameter(
                name,
                python_inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    _optional(hints[name]),
                    typer.Option(help=f"{docs[name]} [default: {defaults[name]}]"),
                ],
            )
            for name in field_names(config_type)
            if name not in but
        ]

        @functools.wraps(verb)
        def with_flags(**given: Any) -> None:
            fields = {flag.name: given.pop(flag.name) for flag in flags}
            verb(**given, fields={name: value for name, value in fields.items() if value is not None})

        del with_flags.__wrapped__  # typer would otherwise look through to the verb's own signature
        with_flags.__signature__ = python_inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *flags]}
        return with_flags

    return decorate


def _optional(hint: Any) -> Any:
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return (kinds[0] if kinds else hint) | None


# ── arguments that several verbs share ─────────────────────────────────────────────────────────────────────────────

Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, or a run folder (its final model).")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A corpus folder.")]
Seed = Annotated[int, typer.Option(help="Repeats the same draws.")]
Precision = Annotated[
    str | None,
    typer.Option(help="Read the weights as fp32 | bf16 | int8 | int4.", show_default="as they are stored"),
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu | cuda.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change any field of the model (clockhand/config.py). Repeat for more."
    ),
]

PRESET_NAMES = " ".join(PRESETS)
SOURCES = "Files or folders of .txt .md .jsonl .csv .parquet (also .gz), builtin:shakespeare, builtin:python."
Sources = Annotated[list[str], typer.Argument(metavar="SOURCE...", help=SOURCES)]
FitMemory = Annotated[
    float | None,
    typer.Option(metavar="GB", help="Smaller micro-batches, as many tokens a step: the largest that fit."),
]
TextField = Annotated[
    str | None,
    typer.Option(help="Field or column that holds the text in .jsonl, .csv and .parquet.", show_default="text"),
]
Encoding = Annotated[
    str | None,
    typer.Option(help="How the text files are written: gb18030, big5, utf-16, ...", show_default="found out for each"),
]
Kind = Annotated[str | None, typer.Option(help="bpe | char | byte: the tokenizer to train.", show_default="bpe")]
VocabSize = Annotated[
    int | None, typer.Option(help="Ids of the tokenizer to train.", show_default="4096; all for char")
]
PresetsVocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", help="Ids of the tokenizer to train.", show_default="the preset's; all for char"),
]
UseTokenizer = Annotated[
    str, typer.Option("--tokenizer", help="Folder or tokenizer.json to use instead of training one.")
]
ValFraction = Annotated[
    float | None, typer.Option(help="Share of the text that is held out for validation.", show_default="0.05")
]


# ── look ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="PRESET|FOLDER", help=f"A model folder, a run folder or a preset: {PRESET_NAMES}.")
    ],
    other: Annotated[str | None, typer.Argument(metavar="OTHER", help="A second one, to compare.")] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Count a model, unbuilt. Parameters by module, active ones, FLOPs, KV cache and memory, from the config alone."""
    from clockhand import inspection

    changes = parse_settings(ModelConfig, settings or [])
    models = [inspection.resolve(name, changes) for name in ([model, other] if other else [model])]
    if as_json:
        print_json(inspection.inspect_json(*models[0][::-1]) if not other else inspection.compare_json(*models))
    else:
        print_rich(inspection.render(*models[0][::-1]) if not other else inspection.render_comparison(*models))


# ── text ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@tokenizer_app.command("train")
def tokenizer_train(
    sources: Sources,
    out: Annotated[Path, typer.Option(help="Folder for tokenizer.json and tokenizer_config.json.")],
    kind: Kind = None,
    vocab_size: VocabSize = None,
    text_field: TextField = None,
    encoding: Encoding = None,
) -> None:
    """Train a tokenizer on text."""
    from clockhand.data.corpora import Report, read_documents
    from clockhand.data.encodings import known_encoding
    from clockhand.data.tokenizer import Tokenizer

    refuse_own_files(sources, "source ")
    refuse_idle_field(text_field, sources)
    refuse_occupied(out)
    report = Report()
    documents = read_documents(sources, text_field or "text", report, encoding and known_encoding(encoding))
    tokenizer = Tokenizer.train(documents, kind or "bpe", vocab_size)
    for _ in documents:  # a byte tokenizer needs none of them, but the report does
        pass
    for line in report.lines():
        say(f"note: {line}")
    if not report.documents:
        raise ClockhandError(f"no text in {', '.join(sources)}: nothing to train a tokenizer on")
    tokenizer.save(out)
    print(
        f"{out}: {tokenizer.kind} tokenizer of {tokenizer.vocab_size:,} ids, from {report.text_bytes:,} bytes of text"
    )


@tokenizer_app.command("show")
def tokenizer_show(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A tokenizer, corpus, model or run folder.")],
    text: Annotated[str | None, typer.Option(help="Text to encode.")] = None,
    as_json: Json = False,
) -> None:
    """What a tokenizer is, and how it cuts a text."""
    from clockhand.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_folder(folder))
    facts: dict[str, Any] = {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": tokenizer.special_tokens,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "fingerprint": tokenizer.fingerprint,
    }
    if text is not None:
        ids = tokenizer.encode(text)
        facts["ids"] = ids
        facts["pieces"] = [tokenizer.piece(id).decode("utf-8", "backslashreplace") for id in ids]
        facts["bytes_per_token"] = round(len(text.encode()) / max(len(ids), 1), 3)
    if as_json:
        print_json(facts)
    else:
        for name, value in facts.items():
            print(f"{name}: {value}")


@data_app.command("prepare")
def data_prepare(
    sources: Sources,
    out: Annotated[Path, typer.Option(help="The corpus folder to make.")],
    tokenizer: UseTokenizer = "",
    kind: Kind = None,
    vocab_size: VocabSize = None,
    text_field: TextField = None,
    encoding: Encoding = None,
    val_fraction: ValFraction = None,
    seed: Seed = 0,
) -> None:
    """Turn text into a corpus. Token shards with a tokenizer, held-out text and checksums."""
    from clockhand.data.shards import CorpusSettings, prepare, show

    refuse_own_files(sources, "source ")
    refuse_idle_field(text_field, sources)
    typed = corpus_flags(tokenizer, kind, vocab_size, text_field, encoding, val_fraction)
    settings = CorpusSettings(sources=tuple(sources), seed=seed, **typed)
    with corpus_progress() as progress:
        corpus = prepare(settings, out, progress)
    say_oddities(corpus)
    print_corpus(show(out))


@data_app.command("show")
def data_show(
    folder: Folder,
    document: Annotated[int | None, typer.Option(help="Print this document of the split.")] = None,
    split: Annotated[str | None, typer.Option(help="With --document: train | val.", show_default="train")] = None,
    as_json: Json = False,
) -> None:
    """What a corpus holds."""
    from clockhand.data.shards import Corpus, show

    corpus = Corpus.open(folder)
    if document is not None:
        split = split or "train"
        part = corpus.split(split)
        if not 0 <= document < part.n_documents:
            raise ClockhandError(f"--document {document} must be between 0 and {part.n_documents - 1} (split {split})")
        ids = part.document(document).tolist()
        text = corpus.tokenizer.decode(ids)
        if as_json:
            print_json({"split": split, "document": document, "text": text, "ids": ids})
        else:
            print(text)
    elif split is not None:
        raise ClockhandError(f"--split {split} has no effect without --document")
    elif as_json:
        print_json(show(folder))
    else:
        print_corpus(show(folder))


@data_app.command("verify")
def data_verify(folder: Folder) -> None:
    """Read a corpus again and compare every file with its SHA-256."""
    from clockhand.data.shards import verify

    print(f"{folder}: {len(verify(folder))} files, all as they were written")


# ── train ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@flags_from(TrainConfig)
def train(
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="SOURCE", help=f"{SOURCES} Or a corpus folder.")
    ] = None,
    preset: Annotated[str, typer.Option(help=f"The model to start from: {PRESET_NAMES}.")] = "tiny",
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/PRESET-DATA")] = None,
    settings: Settings = None,
    tokenizer: UseTokenizer = "",
    kind: Kind = None,
    vocab_size: PresetsVocabSize = None,
    text_field: TextField = None,
    encoding: Encoding = None,
    val_fraction: ValFraction = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only run a step of bad-steps/ again, and name the layer that went wrong."),
    ] = None,
    fit_memory: FitMemory = None,
    prove_resume: Annotated[
        bool,
        typer.Option("--prove-resume", help="Only show that a run that is killed and resumed ends in the same bits."),
    ] = False,
    kills: Annotated[int | None, typer.Option(help="With --prove-resume: how many.", show_default="3")] = None,
    resume: Annotated[
        str, typer.Option(help="auto | never | must: whether to go on with the run that is in --out.")
    ] = "auto",
    logger: Annotated[str, typer.Option(help="none | tensorboard | wandb: who else is told the numbers.")] = "none",
    *,
    fields: dict[str, Any],
) -> None:
    """Train a model on text. The same command again continues a run that was stopped."""
    import torch

    from clockhand.data.shards import Corpus
    from clockhand.memory import refuse_beyond_memory
    from clockhand.train.curves import draw_curves
    from clockhand.train.loggers import with_logger
    from clockhand.train.loop import train as run
    from clockhand.train.parallel import joined
    from clockhand.train.pretrain import corpus_for, model_config_for
    from clockhand.train.progress import make_reporter
    from clockhand.train.run_folder import check_resume
    from clockhand.train.runs import read_run, summary

    if replay is not None:
        from clockhand.train.bad_step import lines_of
        from clockhand.train.bad_step import replay as run_again

        flags = {
            "--prove-resume": prove_resume,
            "--kills": kills,
            "--fit-memory": fit_memory,
            "--resume": resume if resume != "auto" else None,
            "--logger": logger if logger != "none" else None,
            "--data": data,
            "--out": out,
            "--set": settings,
            "--tokenizer": tokenizer or None,
            "--preset": preset if preset != "tiny" else None,
            "--kind": kind,
            "--vocab-size": vocab_size,
            "--text-field": text_field,
            "--encoding": encoding,
            "--val-fraction": val_fraction,
        }
        typed = {f"--{name.replace('_', '-')}": value for name, value in fields.items()}
        refuse_idle({**flags, **typed}, "with --replay, whose file says everything")
        print("\n".join(lines_of(run_again(replay))))
        return
    if not data:
        raise ClockhandError("--data is missing: give files or folders of text, or a corpus folder")
    config = TrainConfig(**fields)
    changes = parse_settings(ModelConfig, settings or [])
    refuse_own_files(data, "--data ")
    refuse_idle_field(text_field, data)
    budget = None if fit_memory is None else memory_budget(fit_memory)
    first = model_config_for(preset, changes)  # a mistake in the model is told before any text is read
    if config.device == "cpu" or not torch.cuda.is_available():
        refuse_beyond_memory(first)
    if prove_resume:
        idle = {"--resume": resume if resume != "auto" else None, "--logger": logger if logger != "none" else None}
        refuse_idle({"--out": out, "--fit-memory": fit_memory, **idle}, "with --prove-resume")
        corpus_settings = corpus_flags(tokenizer, kind, vocab_size, text_field, encoding, val_fraction)
        print_certificate(data, preset, changes, config, 3 if kills is None else kills, corpus_settings)
        return
    refuse_idle({"--kills": kills}, "without --prove-resume")
    out = out or Path("runs") / f"{preset}-{name_of_data(data[0])}"

    check_resume(out, resume)
    reporter = with_logger(make_reporter(), logger, out)

    def corpus_folder() -> str:
        with corpus_progress() as progress:
            corpus = corpus_for(
                data,
                out,
                preset=preset,
                changes=changes,
                progress=progress,
                seed=config.seed,
                **corpus_flags(tokenizer, kind, vocab_size, text_field, encoding, val_fraction),
            )
        say_oddities(corpus)
        return str(corpus.folder)

    with joined(config) as ranks:
        corpus = Corpus.open(ranks.once(corpus_folder))
        model_config = model_config_for(preset, changes, corpus.tokenizer)
        if budget is not None:
            config = TrainConfig(**ranks.once(lambda: fitted(config, model_config, out, ranks.mode, budget)))
        result = run(model_config, config, corpus, out, reporter, ranks, resume, timed=True)
    if not ranks.leads:
        return
    try:
        say(f"loss curves: {draw_curves(out)}")
    except ClockhandError as error:  # the run itself is whole
        say(f"note: {error}")
    ended = read_run(out)
    better = ended.best_step != ended.step and (out / "best").is_dir()
    print(
        f"{summary(ended)}\n"
        f"{out / 'final'}: validation loss {result.loss:.4f} nats per token, {result.bits_per_byte:.4f} bits per byte"
        f"\nnext: {as_command('clockhand', 'generate', out / 'best' if better else out, '--prompt', '...')}"
    )


FORECAST_FIELDS = {
    *("steps", "batch_size", "accumulate", "seq_len", "dtype", "compile", "checkpoint_activations", "optimizer"),
    *("eval_every", "eval_windows", "device", "parallel"),
}
"""Those that memory and time depend on; and `device` and `parallel`, so that values without a forecast are refused."""


@app.command("plan")
@flags_from(TrainConfig, but=set(field_names(TrainConfig)) - FORECAST_FIELDS)
def plan(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET|FOLDER", help=f"A model folder, a run folder or a preset: {PRESET_NAMES}.")
    ],
    settings: Settings = None,
    fit_memory: FitMemory = None,
    as_json: Json = False,
    *,
    fields: dict[str, Any],
) -> None:
    """Forecast a training run. Memory term by term, time and tokens; a few steps on random ids are timed."""
    import torch

    from clockhand import inspection
    from clockhand.train.plan import fit_micro_batch, measure_speed, plan_json
    from clockhand.train.runs import duration
    from clockhand.train.settle import settle

    config = TrainConfig(**fields)
    label, model_config = inspection.resolve(preset, parse_settings(ModelConfig, settings or []))
    if config.seq_len > model_config.max_seq_len:
        raise ClockhandError(f"seq_len = {config.seq_len} must be at most max_seq_len = {model_config.max_seq_len}")
    if config.device == "cuda" or config.parallel in ("ddp", "fsdp"):
        flag = "device = 'cuda'" if config.device == "cuda" else f"parallel = {config.parallel!r}"
        raise ClockhandError(f"{flag} has no forecast: plan tells what one process on the CPU will need")
    budget = None if fit_memory is None else memory_budget(fit_memory)
    config = settle(config, model_config, torch.device("cpu"), note=say)  # first: what fits depends on the precision
    if budget is not None:
        config = fit_micro_batch(model_config, config, budget)
    say("measuring: some steps of one block and of three, on random ids" + ", compiled" * (config.compile == "on"))
    found = plan_json(model_config, config, measure_speed(model_config, config))
    if as_json:
        print_json(found | {"batch_size": config.batch_size, "accumulate": config.accumulate})
        return
    print(f"{label}: {found['parameters']:,} parameters, {config.dtype}")
    plural = "" if config.accumulate == 1 else "es"
    print(f"  {config.accumulate} micro-batch{plural} of {config.batch_size} × {config.seq_len} tokens a step")
    for name in ("weights", "gradients", "optimizer", "activations", "logits", "overhead", "peak"):
        end = ", as not all of them are there at once" if name == "peak" else ""
        print(f"  {name:<12}{found['memory'][name] / 1e9:9.3f} GB{end}")
    print(f"  {found['tok_per_s']:,.0f} tok/s, {found['seconds_per_step']:.3f} s a step")
    print(f"  {config.steps:,} steps, {found['tokens']:,} tokens: {duration(found['seconds'])}")


@app.command("runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look, with all folders below.")] = Path(
        "runs"
    ),
    as_json: Json = False,
) -> None:
    """List training runs. How far they are, how good, and whether they run."""
    from rich.console import Console

    from clockhand.train.runs import find_runs, runs_table

    if not folder.is_dir():
        raise ClockhandError(f"'{folder}' is no folder; name the one that your runs are in")
    found = find_runs(folder, lambda line: say(f"note: {line}"))
    if as_json:
        print_json([dataclasses.asdict(each) for each in found])
        return
    if not found:
        print(f"no runs in {folder}")
        return
    console = Console()
    table, left_out = runs_table(found, console.width if console.is_terminal else None)
    console.print(table, crop=False)
    if left_out:
        say(f"note: the terminal is too narrow for {' and '.join(left_out)}; --json tells everything")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(help="A shorter or longer run.", show_default="as the recipe says")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Shakespeare in a few minutes. His plays, a tokenizer, a tiny model learning, a scene it writes."""
    from clockhand.demo import run

    run(out, steps, seed)


# ── use ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@flags_from(Sampling, but=["logit_bias"])
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue. Without it, and without a file, stdin is read.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A file with a prompt on each line, run as one batch.")
    ] = None,
    speculate: Annotated[
        str | None, typer.Option(metavar="ngram", help="Guess several tokens at once, by looking them up in the text.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Guess several tokens at once, by a smaller model's opinion.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to draw for each prompt at most.")] = 256,
    min_new_tokens: Annotated[int, typer.Option(help="Before so many no end token or --stop ends the text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeat for more.")] = None,
    stop_id: Annotated[
        list[int] | None, typer.Option(help="End with this token, as with the model's own. Repeat for more.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=VALUE", help="Add to the logit of a token; -inf forbids it. Repeat for more."),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Completions of each prompt, with the seeds seed, seed + 1, ...")] = 1,
    seed: Seed = 0,
    precision: Precision = None,
    device: Device = "cpu",
    rope_scaling: Annotated[
        str | None,
        typer.Option(help="Stretch the context: linear | ntk | dynamic | yarn | llama3; or none, as it was trained."),
    ] = None,
    rope_factor: Annotated[
        float | None, typer.Option(help="By how much the context it was trained with is stretched.")
    ] = None,
    inference_rope_scaling: Annotated[
        bool, typer.Option("--inference-rope-scaling", help="MiniMind's switch: YaRN, 16 × 2,048.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="What each stage of the sampling did to the candidates of each token.")
    ] = False,
    explain_route: Annotated[
        bool, typer.Option("--explain-route", help="Say which way the tokens take through the model, and why.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: how probable the model found each token, and so many of the best."),
    ] = None,
    as_json: Json = False,
    *,
    fields: dict[str, Any],
) -> None:
    """Continue a text. One prompt streams as it is written; several prompts or completions print when done."""
    from clockhand.infer.generate import generate_text, prompt_ids, stream
    from clockhand.infer.language_model import moved
    from clockhand.infer.routes import route_of
    from clockhand.infer.stretch import stretched
    from clockhand.train.run_folder import trained_seq_len

    if logprobs is not None and not as_json:
        raise ClockhandError(f"--logprobs {logprobs} has no effect without --json")
    sampling = Sampling(**fields, logit_bias=read_bias(logit_bias or []))
    if speculate not in (None, "ngram"):
        raise ClockhandError(f"--speculate {speculate} must be ngram")
    if speculate is not None and draft is not None:
        raise ClockhandError(f"--speculate {speculate} and --draft {draft} exclude each other")
    if (speculate is not None or draft is not None) and (as_json or prompts_file is not None or n > 1 or explain):
        needed = "without --json, --prompts-file, --n and --explain"
        raise ClockhandError(f"--speculate and --draft need one prompt that streams, {needed}")
    prompts = read_prompts(prompt, prompts_file)
    network, tokenizer, stop_ids = load(model, precision)
    network = stretched(network, rope_scaling, rope_factor, inference_rope_scaling, trained_seq_len(model))
    network = moved(network, device)
    if stop_id:
        own = [tokenizer.eos_id] if stop_ids is None and tokenizer.eos_id is not None else stop_ids or ()
        stop_ids = (*own, *stop_id)
    options: Any = {
        "stop_ids": stop_ids,
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "stop_strings": stop or [],
        "n": n,
        "seed": seed,
        "logprobs": logprobs,
        "explain": explain,
    }
    several = prompts_file is not None or n > 1
    route = route_of(network, len(prompts) * n, explain=explain)
    if explain_route:
        say(f"route {route}")
    elif network.dtype.itemsize == 2:  # as most models of others are
        say(f"note: the weights are stored in {str(network.dtype).removeprefix('torch.')}; tokens take the {route}")
    if as_json or several:
        from clockhand.infer.explain import as_json as explanation_as_json
        from clockhand.infer.explain import render

        completions = generate_text(network, tokenizer, prompts, sampling, **options)
        asked = [text for text in prompts for _ in range(n)]
        if as_json:
            rows = []
            for text, completion in zip(asked, completions):
                row = {"prompt": text, **dataclasses.asdict(completion)}
                if completion.logprobs is None:
                    del row["logprobs"]
                del row["explanations"]
                if completion.explanations is not None:
                    row["explanations"] = [explanation_as_json(each, tokenizer) for each in completion.explanations]
                rows.append(row)
            print_json(rows if several else rows[0])
        else:
            for number, (text, completion) in enumerate(zip(asked, completions)):
                print(end="\n" if number else "")
                for why in completion.explanations or ():
                    print(render(why, tokenizer), end="\n\n")
                print(text + completion.text)
        return

    pieces = stream(network, [prompt_ids(tokenizer, prompts[0])], sampling, tokenizer=tokenizer, **options)
    if explain:
        print_explained(prompts[0], pieces, tokenizer)
        return
    if speculate is not None or draft is not None:
        pieces = speculated(network, tokenizer, prompts[0], sampling, options, draft)
    write(prompts[0])
    for piece in pieces:
        write(piece.text)
        if piece.finish_reason == "context":
            say(f"\n(the model's context of {network.config.max_seq_len} tokens is full)")
    write("\n")


@app.command("eval")
def evaluate(
    model: Model,
    data: Annotated[str, typer.Option(help=f"{SOURCES} Or a corpus folder, whose held-out text is used.")],
    text_field: TextField = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the window that text is read through.",
            show_default="the run's seq_len; else max_seq_len, at most 1024",
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            help="Windows to read at most: of a corpus folder, or at each length.", show_default="1024; 16 at a length"
        ),
    ] = None,
    against_length: Annotated[
        bool,
        typer.Option("--against-length", help="Perplexity with ½ to 4 times the context it was trained with, seq_len."),
    ] = False,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            help="With --against-length: how to stretch, any of none,linear,ntk,dynamic,yarn,llama3.",
            show_default="all but llama3",
        ),
    ] = None,
    precision: Precision = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION|MODEL",
            help="Compare all predictions with those in another precision, or another model's.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a model on text. Loss in nats per token, perplexity and bits per byte."""
    from clockhand.data.corpora import Report
    from clockhand.data.shards import is_corpus
    from clockhand.infer.quantize import compare
    from clockhand.train.evaluate import batches_of_sources, reading_length
    from clockhand.train.evaluate import evaluate as evaluation_of
    from clockhand.train.run_folder import trained_seq_len

    if windows is not None and windows < 1:
        raise ClockhandError(f"--windows {windows} must be at least 1")
    if is_corpus(data) and text_field is not None:
        raise ClockhandError(f"--text-field {text_field} has no effect: '{data}' is a corpus, tokens without fields")
    if not is_corpus(data) and windows is not None and not against_length:
        raise ClockhandError(f"--windows {windows} has no effect: '{data}' is text, which is read to its end")
    if rope_scaling is not None and not against_length:
        raise ClockhandError(f"--rope-scaling {rope_scaling} has no effect without --against-length")
    refuse_own_files([data], "--data ")
    refuse_idle_field(text_field, [data])
    if against is not None and against_length:
        raise ClockhandError(f"--against {against} has no effect with --against-length")
    network, tokenizer, _ = load(model, precision)
    report = Report()
    if seq_len is None:
        seq_len = trained_seq_len(model)
    if against_length:
        # Here memory is no reason for less than what the config declares: it is the length that is left.
        trained = reading_length(network.config, network.config.max_seq_len if seq_len is None else seq_len)
        answer = losses_against_length(network, tokenizer, data, text_field, trained, rope_scaling, windows, report)
    else:
        seq_len = reading_length(network.config, seq_len)
        batches = batches_of_sources(
            network.config, tokenizer, data, text_field or "text", windows or 1024, seq_len, report
        )
        if against is not None:
            answer = vars(compare(network, other_model(model, against, tokenizer), batches)) | {"seq_len": seq_len}
        else:
            try:
                result = evaluation_of(network, batches, tokenizer.token_bytes)
            except ClockhandError as error:  # where nothing was read, why says more than that
                if is_corpus(data) or report.documents:
                    raise
                raise ClockhandError(f"no text in {data}: {'; '.join(report.lines()) or error}") from None
            derived = {name: getattr(result, name) for name in ("loss", "perplexity", "bits_per_byte")}
            answer = vars(result) | derived | {"seq_len": seq_len}
    for line in report.lines():
        say(f"note: {line}")
    if as_json:
        print_json(answer)
    elif against_length:
        print_lengths(answer)
    elif against is not None:
        print(
            f"KL {answer['kl']:.2e} nats per token from {against}, perplexity {answer['perplexity']:.3f} against "
            f"{answer['perplexity_against']:.3f} ({answer['tokens']:,} tokens, windows of {seq_len:,} tokens)"
        )
    else:
        print(
            f"loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.2f}, "
            f"{result.bits_per_byte:.4f} bits per byte "
            f"({result.tokens:,} tokens, {result.bytes:,} bytes, windows of {seq_len:,} tokens)"
        )


# ── elsewhere ──────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A Hugging Face folder, GGUF, llama2.c .bin or MiniMind .pth.")
    ],
    out: Annotated[Path, typer.Option(help="The model folder to make.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, a folder with one, or llama2.c's tokenizer.bin.")
    ] = None,
    inference_rope_scaling: Annotated[
        bool, typer.Option("--inference-rope-scaling", help="MiniMind's switch: YaRN, 16 × 2,048.")
    ] = False,
) -> None:
    """Take a model from another program. Makes a model folder; the format is told by its content."""
    from clockhand.interop.formats import import_model

    made = import_model(source, out, tokenizer, inference_rope_scaling)
    for note in made.notes:
        say(f"note: {note}")
    print(f"{made.folder}: {made.parameters:,} parameters from {made.format}")


@app.command("export")
def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="A folder for hf, a file for the others.")],
    format: Annotated[str, typer.Option(help="hf | gguf | llama2c")] = "gguf",
    dtype: Annotated[
        str | None, typer.Option(help="f32 | f16 | bf16 | q8_0, where the format has it.", show_default="the model's")
    ] = None,
) -> None:
    """Write a model for another program. What a format cannot hold is refused by name."""
    from clockhand.interop.formats import export_model

    made = export_model(model, format, out, dtype)
    for note in made.notes:
        say(f"note: {note}")
    print(f"{made.path}: {made.format}")


@app.command()
def quantize(
    model: Model,
    precision: Annotated[str, typer.Option(help="int8 | int4")],
    out: Annotated[Path, typer.Option(help="The model folder to make.")],
) -> None:
    """Pack the weights of a model. A quarter or an eighth of the size, for clockhand alone to read."""
    from clockhand.interop.formats import quantize_model

    made = quantize_model(model, precision, out)
    print(f"{made.folder}: {made.bytes / 1e6:,.1f} MB of weights, {made.bytes / made.bytes_before:.0%} of before")


@app.command()
def validate(
    model: Model,
    against: Annotated[
        str | None,
        typer.Option(
            help="transformers | llama.cpp | an exported file or folder.", show_default="all that are installed"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare with another program. The same logits, text and token ids there, or a loud no; writes parity.json."""
    from clockhand.interop.parity import validate as compare

    passport = compare(model, against)
    if as_json:
        print_json(dataclasses.asdict(passport))
    else:
        for each in passport.comparisons:
            print(f"{'pass' if each.passed else 'FAIL'}  {each.against}: {each.verdict}")
            difference = f"largest difference {each.largest_difference:.2e} of logits that spread {each.spread:.3g}"
            print(f"      {difference}, KL {each.kl:.2e} nats a token")
        for program, reason in passport.refused.items():
            print(f"none  {program}: {reason}")
    if not passport.passed:
        raise typer.Exit(1)


# ── speed ──────────────────────────────────────────────────────────────────────────────────────────────────────────

BESIDE: dict[str, tuple[str, ...]] = {"moe": (), "experts": (), "context": (), "train": ("transformers",)}
"""Where not all peers run beside."""


_WORKS = "\n".join(f"{name:<9}{what}" for name, what in WORKS.items())


@app.command(
    help="Measure speed beside the peers. One run of alternating rounds, and the share of what the machine could do. "
    f"What can be measured, and about how long it takes on two cores:\n\n\b\n{_WORKS}"
)
def bench(
    work: Annotated[str, typer.Argument(metavar="WORK", help="One of those above.")],
    preset: Annotated[
        str | None,
        typer.Option(
            help="The model, with random weights.", show_default="mini-llama; minimind-3-moe for moe, experts"
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(help="transformers,llama.cpp or none: who runs beside.", show_default="all that are installed"),
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="context: draw it into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    from importlib import import_module

    if work not in WORKS:
        raise unknown_name("bench", work, WORKS)
    from clockhand.bench.measure import wanted_peers

    peers = wanted_peers(peer)
    if peer is not None:
        refuse_idle(
            {"--peer": next((name for name in peers if name not in BESIDE.get(work, peers)), None)}, f"with {work}"
        )
    preset = preset or ("minimind-3-moe" if work in ("moe", "experts") else "mini-llama")
    if work != "context":
        refuse_idle({"--figure": figure}, f"with {work}")
    result = import_module(f"clockhand.bench.{work}").run(preset, peers)
    if figure is not None:
        from clockhand.bench.context import draw

        draw(result, figure)
        say(f"figure: {figure}")
    if as_json:
        print_json(result.as_json())
    else:
        for line in result.lines():
            print(line)


# ── learn ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def lab(
    claims: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CLAIM]...", help="A10 B06: these in full. 'ablate FIELD=A,B': compare values of a field."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The claims that need training too.")] = False,
    lang: Annotated[str, typer.Option(help="en | zh")] = "en",
    html: Annotated[Path | None, typer.Option(help="Write the report, one page, to this file.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    model: Annotated[Path | None, typer.Option(help="B20, B21: ask this of a model folder of yours.")] = None,
    text: Annotated[Path | None, typer.Option(help="With --model: the text it reads.")] = None,
    budget: Annotated[str | None, typer.Option(help="ablate: the time to spend.", show_default="5m")] = None,
    equal: Annotated[
        str | None, typer.Option(help="ablate: parameters | flops held equal.", show_default="parameters")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the claims of the two chapters. Every formula and number of theirs holds, or fails, on this machine."""
    names = claims or []
    typed = {"--all": everything, "--html": html, "--fresh": fresh, "--model": model, "--text": text}
    if names[:1] == ["ablate"]:
        from clockhand.lab.ablate import run_ablation

        refuse_idle(typed, "with 'ablate'")

        if len(names) != 2:
            raise ClockhandError("ablate takes one FIELD=VALUE,VALUE: clockhand lab ablate mlp=swiglu,relu,gelu")
        found = run_ablation(names[1], equal or "parameters", budget or "5m", lang, as_json_text=as_json)
        if as_json:
            print_json(found)
        return
    for flag, value in (("--budget", budget), ("--equal", equal)):
        if value is not None:
            raise ClockhandError(f"{flag} {value} has no effect without 'ablate'")
    if model is not None:
        from clockhand.lab.show import look_inside

        without_effect = {name: typed[name] for name in ("--all", "--html", "--fresh")}
        refuse_idle(without_effect | {"--json": as_json, "--lang": lang != "en"}, "with --model")
        if len(names) != 1 or text is None:
            raise ClockhandError(
                "--model needs one claim and --text FILE: clockhand lab B20 --model FOLDER --text FILE"
            )
        look_inside(names[0], model, read_text(text, "--text"))
        return
    if text is not None:
        raise ClockhandError(f"--text {text} has no effect without --model")
    if names:
        refuse_idle({"--all": everything}, f"with {' '.join(names)}")
    from clockhand.lab.show import run_claims

    raise typer.Exit(run_claims(names, everything, lang, as_json, html, fresh))


# ── helpers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(name: str, precision: str | None = None) -> "tuple[Transformer, Tokenizer, tuple[int, ...] | None]":
    """The model of a model or run folder, its tokenizer, and the end tokens it declares (None: the tokenizer's own).

    Its matrices are packed in `precision`; None leaves them as they are stored.
    """
    from clockhand.data.tokenizer import Tokenizer
    from clockhand.interop.hf import end_ids, find_model_folder, load_model

    folder = find_model_folder(name)
    network = load_model(folder)
    if precision is not None:
        from clockhand.model.packed import packed

        network = packed(network, precision)
    return network, Tokenizer.load(folder), end_ids(folder) or None


def other_model(model: str, against: str, tokenizer: "Tokenizer") -> "Transformer":
    """What `eval --against` means: the same model in a precision, or another of the same tokenizer."""
    from clockhand.model.packed import PRECISIONS

    if against in PRECISIONS:
        return load(model, against)[0]
    if not Path(against).exists():
        raise unknown_name("precision or model", against, PRECISIONS, "--against")
    other, words, _ = load(against)
    if words.fingerprint != tokenizer.fingerprint:
        raise ClockhandError(f"--against {against} has another tokenizer: their predictions cannot be compared")
    return other


def speculated(
    network: "Transformer",
    tokenizer: "Tokenizer",
    prompt: str,
    sampling: Sampling,
    options: dict[str, Any],
    draft: str | None,
) -> "Iterator[Piece]":
    """`generate --speculate ngram` or `--draft MODEL`: the pieces, and at last how many guesses were right.

    What cannot be is refused here, before anything is written.
    """
    from clockhand.infer.generate import prompt_ids
    from clockhand.infer.speculative import Drafter, ModelDrafter, NgramDrafter, Speculation, speculative_pieces

    drafter: Drafter = NgramDrafter()
    if draft is not None:
        smaller, words, _ = load(draft)
        if words.fingerprint != tokenizer.fingerprint:
            raise ClockhandError(f"--draft {draft} has another tokenizer: its guesses would be other words")
        drafter = ModelDrafter(smaller, sampling, options["seed"])
    stop_ids, numbers = options["stop_ids"], ("max_new_tokens", "min_new_tokens", "seed")
    if stop_ids is None:
        stop_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    ids = prompt_ids(tokenizer, prompt)
    speculation = Speculation(
        model=network,
        prompt=ids,
        drafter=drafter,
        sampling=sampling,
        stop_ids=stop_ids,
        known_ids=tokenizer.vocab_size,
        **{name: options[name] for name in numbers},
    )

    def pieces() -> "Iterator[Piece]":
        yield from speculative_pieces(speculation, tokenizer, options["stop_strings"])
        told = speculation.statistics
        say(f"\n({told.accepted} of {told.drafted} drafted tokens accepted; put to rest {told.switched_off} times)")

    return pieces()


def losses_against_length(
    network: "Transformer",
    tokenizer: "Tokenizer",
    data: str,
    text_field: str | None,
    trained: int,
    rope_scaling: str | None,
    windows: int | None,
    report: "Report",
) -> dict[str, Any]:
    """`eval --against-length`, for programs: nats per token and perplexity of each scaling at each of `lengths`."""
    import torch

    from clockhand.data.corpora import read_documents
    from clockhand.data.shards import is_corpus
    from clockhand.train.evaluate import corpus_of
    from clockhand.train.lengths import SCALINGS, WINDOWS, losses_by_length

    if is_corpus(data):
        held_out = corpus_of(data, tokenizer).split("val")
        ids = held_out.read(0, held_out.n_tokens).astype("int64").tolist()
    else:
        texts = read_documents([data], text_field or "text", report)
        ids = [id for text in texts for id in tokenizer.encode(text, bos=True)]
    scalings = SCALINGS if rope_scaling is None else [each.strip() for each in rope_scaling.split(",")]
    found = losses_by_length(network, torch.tensor(ids), trained, scalings, windows or WINDOWS)
    return {"seq_len": trained, "lengths": found.lengths, "loss": found.losses, "perplexity": found.perplexities}


def print_lengths(answer: dict[str, Any]) -> None:
    """The perplexities of `eval --against-length`, for people."""
    from rich.table import Table

    print(f"perplexity by tokens of context; trained with {answer['seq_len']:,}")
    rows = Table("rope_scaling", box=None, header_style="bold", pad_edge=False)
    for length in answer["lengths"]:
        rows.add_column(f"{length:,}", justify="right")
    for scaling, perplexities in answer["perplexity"].items():
        rows.add_row(scaling, *(f"{each:.2f}" for each in perplexities))
    print_rich(rows)


def print_certificate(
    data: list[str],
    preset: str,
    changes: dict[str, Any],
    config: TrainConfig,
    kills: int,
    corpus_settings: dict[str, Any],
) -> None:
    """`train --prove-resume`. Exits with 1 where the killed run is another."""
    import tempfile

    from clockhand.train.pretrain import corpus_for, model_config_for
    from clockhand.train.prove import MOST_KILLS, lines_of
    from clockhand.train.prove import prove_resume as prove

    if not 1 <= kills <= MOST_KILLS:
        raise ClockhandError(f"--kills {kills} must be between 1 and {MOST_KILLS:,}")
    if "RANK" in os.environ:
        raise ClockhandError("--prove-resume starts its own processes: run it without torchrun")
    if config.parallel in ("ddp", "fsdp"):
        raise ClockhandError(f"--parallel {config.parallel} has no effect with --prove-resume, which runs one process")
    with tempfile.TemporaryDirectory(prefix="clockhand-prove-") as folder:
        with corpus_progress() as progress:
            corpus = corpus_for(
                data, Path(folder) / "text", preset, changes, progress, seed=config.seed, **corpus_settings
            )
        model_config = model_config_for(preset, changes, corpus.tokenizer)
        certificate = prove(model_config, config, corpus, kills, Path(folder), say)
    print("\n".join(lines_of(certificate)))
    if certificate.difference:
        raise typer.Exit(1)


def fitted(config: TrainConfig, model: ModelConfig, out: Path, mode: str, budget: int) -> dict[str, Any]:
    """`train --fit-memory`: the config that fits, settled first, as what fits depends on the precision."""
    import torch

    from clockhand.train.plan import fit_micro_batch
    from clockhand.train.run_folder import started_train
    from clockhand.train.settle import settle

    kind = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    settled = settle(config, model, torch.device(kind), mode, started_train(out), say)
    return dataclasses.asdict(fit_micro_batch(model, settled, budget))


def memory_budget(gigabytes: float) -> int:
    """`--fit-memory` in bytes."""
    if not 0 < gigabytes < 1e9:
        raise ClockhandError(f"--fit-memory {gigabytes:g} must be a number of GB above 0")
    return round(gigabytes * 1e9)


def corpus_flags(
    tokenizer: str,
    kind: str | None,
    vocab_size: int | None,
    text_field: str | None,
    encoding: str | None,
    val_fraction: float | None,
) -> dict[str, Any]:
    """Those settings of a corpus that were typed. `CorpusSettings` has the defaults of the others."""
    if tokenizer and kind is not None:
        raise ClockhandError(f"--kind {kind} has no effect with --tokenizer {tokenizer}: none is trained")
    flags = {"tokenizer": tokenizer or None, "kind": kind, "vocab_size": vocab_size, "text_field": text_field}
    from clockhand.data.encodings import known_encoding

    flags["encoding"] = None if encoding is None else known_encoding(encoding)
    return {name: value for name, value in {**flags, "val_fraction": val_fraction}.items() if value is not None}


def refuse_occupied(out: Path) -> None:
    """A tokenizer is written beside nothing else: in a model or a corpus it would take the place of theirs."""
    if out.exists() and not out.is_dir():
        raise ClockhandError(f"--out {out} is a file, not a folder")
    others = {path.name for path in out.iterdir()} - {"tokenizer.json", "tokenizer_config.json"} if out.exists() else ()
    if others:
        raise ClockhandError(f"--out {out} holds other things than a tokenizer ({min(others)}); name a new folder")


def refuse_own_files(sources: list[str], flag: str) -> None:
    """A model or run folder has text files in it, a log and a card, which nobody means when they say text."""
    from clockhand.interop.folders import is_model_folder
    from clockhand.train.run_folder import is_run_folder

    for folder in (Path(source) for source in sources if source):
        if is_run_folder(folder) or is_model_folder(folder):
            hint = f"; its corpus is {folder / 'corpus'}" if (folder / "corpus").is_dir() else ""
            raise ClockhandError(f"{flag}'{folder}' is a model or a run, not text{hint}")


def refuse_idle_field(text_field: str | None, sources: list[str]) -> None:
    """A text file is read whole: --text-field says nothing where there are no others. Of a corpus others tell that."""
    from clockhand.data.corpora import find_files
    from clockhand.data.shards import is_corpus

    if text_field is None or any(is_corpus(source) for source in sources):
        return
    if all(file.format == "text" for file in find_files(sources)):
        raise ClockhandError(
            f"--text-field {text_field} has no effect: no .jsonl, .csv or .parquet in {', '.join(sources)}"
        )


def tokenizer_folder(name: str) -> Path:
    """Where the tokenizer of a tokenizer, corpus, model or run folder is."""
    if name and ((Path(name) / "tokenizer.json").exists() or Path(name).is_file()):
        return Path(name)
    from clockhand.interop.hf import find_model_folder

    return find_model_folder(name)


def read_prompts(prompt: str | None, prompts_file: Path | None) -> list[str]:
    if prompt is not None and prompts_file is not None:
        raise ClockhandError("give --prompt or --prompts-file, not both")
    if prompt is not None:
        return [prompt]
    if prompts_file is not None:
        # Not splitlines: a form feed or U+2028 within a prompt ends no line of a file.
        content = read_text(prompts_file, "--prompts-file").replace("\r\n", "\n")
        prompts = content.removesuffix("\n").split("\n")
        if not content:
            raise ClockhandError(f"--prompts-file {prompts_file} is empty: put one prompt on each line")
        return prompts
    if sys.stdin is None:
        raise ClockhandError("stdin is closed: give --prompt or --prompts-file")
    if sys.stdin.isatty():
        say("(type a prompt, then Ctrl-D)")
    return [decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n")]


def read_text(file: Path, flag: str) -> str:
    """The UTF-8 text of the file that `flag` names. Raises `ClockhandError` naming both."""
    try:
        return decoded(file.read_bytes(), f"{flag} {file}")
    except OSError as error:
        raise ClockhandError(f"cannot read {flag} {file}: {error.strerror}") from None


def refuse_idle(flags: dict[str, Any], where: str) -> None:
    """Raises `ClockhandError` for the first of `flags` that was given though nobody reads it `where` we are."""
    for flag, value in flags.items():
        if value not in (None, False):
            given = flag if value is True else f"{flag} {value}"
            raise ClockhandError(f"{given} has no effect {where}")


def read_bias(settings: list[str]) -> dict[int, float]:
    """`["7=1.5", "9=-inf"]` as a `logit_bias`."""
    bias: dict[int, float] = {}
    for setting in settings:
        id, _, value = setting.partition("=")
        try:
            if int(id) in bias:
                raise ClockhandError(f"--logit-bias {setting}: id {int(id)} has one already")
            bias[int(id)] = float(value)
        except ClockhandError:
            raise
        except ValueError:
            raise ClockhandError(f"--logit-bias {setting} must look like ID=VALUE, as in 7=1.5 or 7=-inf") from None
    return bias


def print_explained(prompt: str, pieces: "Iterator[Piece]", tokenizer: "Tokenizer") -> None:
    """A table for every token, each as it is drawn, and then the text."""
    from clockhand.infer.explain import render

    text = prompt
    for piece in pieces:
        text += piece.text
        if piece.explanation is not None:
            write(render(piece.explanation, tokenizer) + "\n\n")
    print(text)


def decoded(content: bytes, source: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ClockhandError(f"{source} must be UTF-8 text, but byte {error.start} is not") from None


@contextlib.contextmanager
def corpus_progress() -> "Iterator[Callable[[str, int, int], None]]":
    """A bar on a terminal for reading and tokenizing text; nothing on a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase)
            bars.update(tasks[phase], completed=done, total=total or None)

        yield progress


def print_corpus(facts: dict[str, Any]) -> None:
    """`show` of a corpus, for people."""
    tokenizer = facts["tokenizer"]
    print(f"tokenizer  {tokenizer['kind']}, {tokenizer['vocab_size']:,} ids")
    for name, split in facts["splits"].items():
        amount = f"{split['documents']:,} documents, {split['tokens']:,} tokens, {split['text_bytes']:,} bytes of text"
        print(f"{name:<9}  {amount} ({facts['bytes_per_token'][name]:.2f} a token)")
    print(f"held out   {facts['held_out']}")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_rich(renderable: Any) -> None:
    from rich.console import Console

    Console().print(renderable)


def write(text: str) -> None:
    """To stdout, at once: a reader watches it appear."""
    sys.stdout.write(text)
    sys.stdout.flush()


def name_of_data(source: str) -> str:
    """What a run on `source` is called where nothing was said: notes of notes.txt, the folder's own name of `.`."""
    if source.startswith("builtin:"):
        return source.removeprefix("builtin:")
    return Path(source).resolve().name.split(".")[0] or "text"


def say(line: str) -> None:
    """To stderr, where everything goes that is not the answer."""
    print(line, file=sys.stderr, flush=True)


def say_oddities(corpus: "Corpus") -> None:
    """What was odd in the sources, if anything was."""
    for line in corpus.report.lines():
        say(f"note: {line}")


# ── the way in ─────────────────────────────────────────────────────────────────────────────────────────────────────


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"clockhand {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 done, 1 refused, 2 not understood, 130 Ctrl-C, 143 SIGTERM."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # libgomp's threads spin at full speed while they wait for each other; on a busy machine that halves ours (LOG.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding does not have is no reason to stop
            stream.reconfigure(errors="replace")
    try:
        words = [argument for argument in arguments if argument != "--debug"]
        code = typer.main.get_command(app)(words, standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can still be told; Python's own at the end is too late
        sys.exit(code)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's answer to '| head', which it counts as a failure
            sys.exit(0)
        raise
    except Exception as error:
        if isinstance(error, OSError):
            drop_unwritten()
        if debug:
            traceback.print_exc()
        code, line = outcome(error)
        if line is None:
            raise
        if line:
            say(line)
        sys.exit(code)
    except KeyboardInterrupt:
        say("")
        sys.exit(130)


def drop_unwritten() -> None:
    """Lets go of what stdout could not take, or Python would try once more at the end, and fail aloud."""
    with contextlib.suppress(AttributeError, OSError):  # stdout is closed, or a test's
        sink = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(sink, sys.stdout.fileno())
        finally:
            os.close(sink)


Misuse: Any = typer.BadParameter.__base__  # an unknown flag, a missing argument: typer does not export the class


def outcome(error: Exception) -> tuple[int, str | None]:
    """The exit code for an error and the line to say; None for a fault of ours, which shows its traceback."""
    if isinstance(error, typer.Abort):  # Ctrl-C
        return 130, ""
    if isinstance(error, Misuse):
        error.show()
        return 2, ""
    if isinstance(error, Interrupted):
        return error.exit_code, "stopped; everything is saved, and the same command goes on"
    if isinstance(error, BrokenPipeError):
        return 0, ""
    if isinstance(error, ClockhandError):
        return 1, f"error: {error}"
    full = ("not enough memory", "out of memory", "can't allocate memory")  # torch has no exception for the CPU's
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(map(str(error).__contains__, full))):
        return 1, "error: not enough memory; a smaller model, batch_size or seq_len needs less (--debug shows where)"
    if isinstance(error, OSError) and error.strerror:
        where = f" '{error.filename}'" if error.filename else ""
        return 1, f"error: {error.strerror}{where}"
    return 1, None


if __name__ == "__main__":
    main()
