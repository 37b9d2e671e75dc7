"""One stream, token after token, greedily: ours in each precision, each peer in what it has nearest to it."""

from collections.abc import Callable

from clockhand.bench.contest import TORCH_DTYPES, Report, check_fits, contest, report
from clockhand.bench.measure import alternate, limits, seconds
from clockhand.infer.generate import stream
from clockhand.infer.kernels.library import library
from clockhand.infer.kernels.weights import packed_for
from clockhand.infer.settings import GREEDY
from clockhand.model.packed import PRECISIONS
from clockhand.model.transformer import Transformer

PROMPT = [1, 2, 3, 4]


def run(preset: str, peers: list[str], rounds: int = 5, new_tokens: int = 96) -> Report:
    with contest(preset) as work:
        check_fits(work, len(PROMPT) + new_tokens)
        contestants: dict[str, Callable[[], float]] = {}
        bounds, walls, few = {}, limits(), max(new_tokens // 4, 1)
        for precision in PRECISIONS:
            model = work.packed(precision)
            contestants[f"clockhand {precision}"] = lambda model=model: ours(model, PROMPT, new_tokens)  # type: ignore[misc]
            bounds[f"clockhand {precision}"] = walls.decode_tok_per_s(bytes_a_token(model))
            if "llama.cpp" in peers:
                from clockhand.bench.peers import InLlamaCpp

                llama = InLlamaCpp(work.gguf(precision), len(PROMPT) + new_tokens + 32)
                contestants[f"llama.cpp {precision}"] = lambda llama=llama: llama.decode(PROMPT, new_tokens)  # type: ignore[misc]
            if "transformers" in peers and precision in TORCH_DTYPES:
                from clockhand.bench.peers import InTransformers

                theirs = InTransformers(work.hugging_face(), TORCH_DTYPES[precision])
                contestants[f"transformers {precision}"] = lambda theirs=theirs: theirs.decode(PROMPT, few)  # type: ignore[misc]
        return report("decode, one stream", preset, alternate(contestants, rounds), bounds, walls)


def ours(model: Transformer, prompt: list[int], new_tokens: int) -> float:
    """Tokens a second of `stream`, without the first one, which reads the prompt."""
    pieces = stream(model, [prompt], GREEDY, max_new_tokens=new_tokens + 1)
    next(pieces)
    return new_tokens / seconds(lambda: list(pieces))


def bytes_a_token(model: Transformer) -> int:
    """Bytes of weights that a token of one stream reads."""
    return packed_for(model, library()).bytes_a_token
