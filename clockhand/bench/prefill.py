"""A prompt of 512 tokens at once, to the logits after its last."""

from collections.abc import Callable

from clockhand.bench.contest import TORCH_DTYPES, Report, check_fits, contest, report
from clockhand.bench.measure import alternate, limits, seconds
from clockhand.infer.generate import stream
from clockhand.infer.settings import GREEDY
from clockhand.model.transformer import Transformer

TOKENS = 512


def run(preset: str, peers: list[str], rounds: int = 7) -> Report:
    with contest(preset) as work:
        check_fits(work, TOKENS)
        ids = [i % work.config.vocab_size for i in range(TOKENS)]
        contestants: dict[str, Callable[[], float]] = {}
        walls, bounds = limits(), {}
        flops = 2 * sum(each.numel() for each in work.model.parameters())
        for precision, dtype in TORCH_DTYPES.items():
            model = work.packed(precision)
            contestants[f"clockhand {precision}"] = lambda model=model: ours(model, ids)  # type: ignore[misc]
            bounds[f"clockhand {precision}"] = walls.prefill_tok_per_s(flops, dtype)
            if "llama.cpp" in peers:
                from clockhand.bench.peers import InLlamaCpp

                llama = InLlamaCpp(work.gguf(precision), TOKENS + 32)
                contestants[f"llama.cpp {precision}"] = lambda llama=llama: llama.prefill(ids)  # type: ignore[misc]
            if "transformers" in peers:
                from clockhand.bench.peers import InTransformers

                theirs = InTransformers(work.hugging_face(), dtype)
                contestants[f"transformers {precision}"] = lambda theirs=theirs: theirs.prefill(ids)  # type: ignore[misc]
        return report(f"prefill of {TOKENS}", preset, alternate(contestants, rounds), bounds, walls)


def ours(model: Transformer, ids: list[int]) -> float:
    """Tokens of the prompt over the time to the first piece of `stream`."""
    return len(ids) / seconds(lambda: list(stream(model, [ids], GREEDY, max_new_tokens=1)))
