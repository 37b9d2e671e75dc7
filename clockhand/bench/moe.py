"""A mixture of experts beside a dense model of as many active parameters: what the choosing costs."""

from clockhand.bench.contest import Report, contest, report
from clockhand.bench.decode import ours
from clockhand.bench.measure import alternate, limits
from clockhand.infer.decode import Decoder

DENSE = {"minimind-3-moe": "minimind-3"}
"""63,936,768 active parameters beside 63,912,192."""


def run(preset: str, peers: list[str], rounds: int = 5, new_tokens: int = 48) -> Report:
    """`preset` is ignored unless it has a dense twin; there are no peers in this one."""
    name = preset if preset in DENSE else "minimind-3-moe"
    with contest(name, max_seq_len=1024) as moe, contest(DENSE[name], max_seq_len=1024) as dense:
        walls, contestants, bounds = limits(), {}, {}
        for label, model in ((name, moe.model), (DENSE[name], dense.model)):
            decoder = Decoder(model, "bf16")
            contestants[label] = ours(decoder, new_tokens)
            bounds[label] = walls.decode_tok_per_s(decoder.info.weight_bytes)
        return report("decode, experts and dense, bf16", name, alternate(contestants, rounds), bounds, walls)
