"""32 streams at once, greedily: our engine, transformers' batch, llama.cpp's batch with a sequence for each."""

from collections.abc import Callable

import torch

from clockhand.bench.contest import TORCH_DTYPES, Report, contest, report
from clockhand.bench.measure import alternate, limits, seconds
from clockhand.infer.engine import Engine, Request
from clockhand.infer.settings import GREEDY
from clockhand.model.transformer import Transformer

STREAMS = 32


def run(preset: str, peers: list[str], rounds: int = 7, new_tokens: int = 24) -> Report:
    with contest(preset) as work:
        contestants: dict[str, Callable[[], float]] = {}
        walls, bounds = limits(), {}
        flops = 2 * sum(each.numel() for each in work.model.parameters())
        for precision in ("fp32", "bf16", "int8"):
            dtype = TORCH_DTYPES.get(precision)
            model = work.packed(precision)
            contestants[f"clockhand {precision}"] = lambda model=model: ours(model, new_tokens)  # type: ignore[misc]
            bounds[f"clockhand {precision}"] = walls.prefill_tok_per_s(flops, dtype or torch.bfloat16)
            if "llama.cpp" in peers:
                from clockhand.bench.peers import InLlamaCpp

                llama = InLlamaCpp(work.gguf(precision), 64, rows=STREAMS)
                contestants[f"llama.cpp {precision}"] = lambda llama=llama: llama.batch(new_tokens)  # type: ignore[misc]
            if "transformers" in peers and dtype is not None:
                from clockhand.bench.peers import InTransformers

                theirs = InTransformers(work.hugging_face(), dtype)
                contestants[f"transformers {precision}"] = lambda theirs=theirs: theirs.batch(STREAMS, new_tokens)  # type: ignore[misc]
        return report(f"{STREAMS} streams", preset, alternate(contestants, rounds), bounds, walls)


def ours(model: Transformer, new_tokens: int) -> float:
    """The first tokens, for which each stream reads its prompt, are not counted."""
    engine = Engine(model, slots=STREAMS, max_seq_len=64)
    for _ in range(STREAMS):
        engine.submit(Request(ids=[7], sampling=GREEDY, max_new_tokens=new_tokens + 2))
    started = 0
    while started < STREAMS:
        started += len(engine.step())
    tokens = 0

    def steps() -> None:
        nonlocal tokens
        for _ in range(new_tokens):
            tokens += len(engine.step())

    elapsed = seconds(steps)
    return tokens / elapsed
