"""The folder of one run: what is written there at the start, and what a run that comes back must agree with.

    corpus/          the data, where the run was given text
    config.json      everything resolved: model, training, data, versions
    log.jsonl        one line per step
    curves.png       the losses, where matplotlib is installed
    checkpoints/     model folders from which the run can go on
    best/            the weights with the lowest validation loss, a model folder
    bad-steps/       steps that went wrong, to be run again
    final/           the trained model, a model folder

How these are written is in `log.py`, `checkpoint.py` and `disk.py`.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import clockhand
from clockhand.data.shards import Corpus
from clockhand.disk import remove_leftovers, write_text
from clockhand.errors import ClockhandError
from clockhand.lock import release, take
from clockhand.train.config import MAY_CHANGE, TrainConfig
from clockhand.train.runs import CONFIG, LOCK, has_checkpoints, read_run_config


def trained_seq_len(folder: str | Path) -> int | None:
    """The seq_len that the run in `folder` trains at; None where it is no run folder, or no longer says."""
    config = read_run_config(Path(folder))
    seq_len = config["train"].get("seq_len") if config else None
    return seq_len if type(seq_len) is int and seq_len >= 1 else None


def is_run_folder(folder: Path) -> bool:
    """Whether a run has been started in it, be it that its config.json is damaged: the checkpoints say the same."""
    return read_run_config(folder) is not None or has_checkpoints(folder)


def started_train(out: Path) -> dict[str, Any] | None:
    """The training settings that a run was started with in `out`; None if none was."""
    config = read_run_config(out)
    return config["train"] if config else None


def open_run_folder(out: Path) -> None:
    """Makes `out`, or makes sure that it is a run folder, and tidies it; it is then ours until `let_go`.

    Raises `ClockhandError` if it is something else, or another process is at work there.
    """
    if out.exists() and not out.is_dir():
        raise ClockhandError(f"--out {out} is a file, not a folder")
    if out.exists() and not is_run_folder(out) and not _is_yet_unused(out):
        raise ClockhandError(f"--out {out} holds other things than a training run; name a new or empty folder")
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
        if not take(out / LOCK):
            raise ClockhandError(f"--out {out} is in use: another process is training there")
        remove_leftovers(out)
        remove_leftovers(out / "checkpoints")
    except OSError as error:
        where = f" ({error.filename})" if error.filename and Path(error.filename) != out else ""
        raise ClockhandError(f"cannot write to --out {out}: {error.strerror}{where}") from error


RESUME = ("auto", "never", "must")


def check_resume(out: Path, resume: str) -> None:
    """Raises `ClockhandError` where `resume` (auto | never | must) does not go with what is in `out`."""
    if resume not in RESUME:
        raise ClockhandError(f"--resume {resume} must be {' | '.join(RESUME)}")
    if resume == "never" and is_run_folder(out):
        raise ClockhandError(f"--resume never, but --out {out} holds a run; name another folder, or --resume auto")
    if resume == "must" and not any((out / "checkpoints").glob("step-*")):
        raise ClockhandError(f"--resume must, but --out {out} holds no checkpoint to go on from")


def describe_data(corpus: Corpus) -> dict[str, Any]:
    """What is remembered of the data: where it was, how much there is, and a hash of all of it."""
    content = json.dumps(corpus.index["files"], sort_keys=True)  # has the hash of every file
    return {
        "folder": str(corpus.folder),
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
        "train_tokens": corpus.split("train").n_tokens,
        "val_tokens": corpus.split("val").n_tokens,
    }


def write_run_config(out: Path, plan: Mapping[str, Any]) -> None:
    """`plan` has the sections model, train and data."""
    versions = {"clockhand": clockhand.__version__, "torch": torch.__version__, "python": platform.python_version()}
    write_text(out / CONFIG, json.dumps({**plan, "versions": versions}, indent=2, ensure_ascii=False) + "\n")


def refuse_changes(out: Path, started: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raises `ClockhandError` naming what in `asked` differs from the run that `started` in `out`."""
    for section in ("model", "train"):
        for name, value in started[section].items():
            now = asked[section].get(name)
            if now != value and (
                name not in MAY_CHANGE or (name == "warmup_steps" and not _follow_steps(started, asked))
            ):
                raise ClockhandError(
                    f"{name} = {now!r} but the run in {out} was started with {value!r}; give that, or another --out"
                )
    threads, now = started.get("threads"), asked["threads"]
    if asked["train"]["deterministic"] and threads != now:
        raise ClockhandError(
            f"deterministic = True, and the run in {out} was started with {threads} threads, not {now}: "
            f"set OMP_NUM_THREADS={threads}"
        )
    if started["data"]["sha256"] != asked["data"]["sha256"]:
        folders = f"{asked['data']['folder']} is not, or is no longer, {started['data']['folder']}"
        raise ClockhandError(f"the run in {out} was started with other data ({folders}); give that, or another --out")


def _follow_steps(*runs: Mapping[str, Any]) -> bool:
    """Whether nobody gave any of these runs a warm-up of its own: then it may change with the number of steps."""
    return all(TrainConfig(steps=run["train"]["steps"]).warmup_steps == run["train"]["warmup_steps"] for run in runs)


def let_go(out: Path) -> None:
    """The run in `out` is over for this process, and another may go on with it."""
    release(out / LOCK)


def _is_yet_unused(out: Path) -> bool:
    """Whether nothing is in it but what is made before our config.json."""
    return {path.name for path in out.iterdir() if not path.name.startswith(".")} <= {"checkpoints", "corpus"}
