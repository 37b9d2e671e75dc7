"""Mixture of experts: many MLPs, of which each token visits k.

    p = softmax(x·W_router)            one probability per expert, in fp32
    y = Σ_{e in top-k(p)} w_e · expert_e(x)      w = p, or p / Σ p over the chosen (renormalize_top_k)

With k = 1 and renormalisation the weight is always 1, so the language-model loss sends the router no gradient at all;
only the balance loss trains it (MiniMind-3 is such a model).

The dispatch sorts the (token, choice) pairs by expert and runs each expert once on its contiguous rows; training and
inference share it. `forward_reference` says the same with a loop over tokens. A block compiled for a CPU runs its
experts by `moe_groups.py` instead, which leaves the compiler nothing open.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.model.mlp import make_mlp
from clockhand.model.moe_groups import can_group, run_experts


class Routing(NamedTuple):
    """Where N tokens go."""

    probabilities: Tensor  # (N, E) fp32, over all experts
    experts: Tensor  # (N, k) int64, the chosen ones, most probable first
    weights: Tensor  # (N, k) fp32, what each chosen expert's answer is multiplied by


def route(router_logits: Tensor, k: int, renormalize: bool) -> Routing:
    """The top-k rule for `router_logits` (N, E). Softmax in fp32 over all experts, then the k largest."""
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    weights, experts = probabilities.topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(probabilities, experts, weights)


def balance_loss(routing: Routing, counted: Tensor | None = None) -> Tensor:
    """E · Σ_e f_e · P_e, a scalar: 1 at perfect balance for any k, up to E when all tokens go to one expert.

    f_e is the share of the choices that fell on expert e, P_e its mean probability (Fedus et al. 2021, with f divided
    by k). `counted` (N,) bool leaves tokens out, as padding must be; with none left the loss is 0.
    """
    n_experts = routing.probabilities.shape[-1]
    chosen = torch.nn.functional.one_hot(routing.experts, n_experts).float().mean(1)  # (N, E), rows sum to 1
    if counted is None:
        return n_experts * (chosen.mean(0) * routing.probabilities.mean(0)).sum()
    kept = counted.float()[:, None]  # (N, 1)
    tokens = kept.sum().clamp(min=1)
    share = (chosen * kept).sum(0) / tokens
    probability = (routing.probabilities * kept).sum(0) / tokens
    return n_experts * (share * probability).sum()


class MixtureOfExperts(nn.Module):
    """y = Σ_{e in top-k} w_e · expert_e(x)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k, self.renormalize = config.n_experts_per_token, config.renormalize_top_k
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.experts = nn.ModuleList(make_mlp(config) for _ in range(config.n_experts))

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (B, T, D) -> the answer (B, T, D) and the balance loss, a scalar not yet multiplied by its coefficient.

        `is_token` (B, T) bool is False at padding, which visits no expert, gets 0 and does not count as load.
        """
        if torch.compiler.is_compiling() and self.is_one_graph(x.device) and is_token is None:
            return self.forward_grouped(x)
        tokens = x.flatten(0, -2)  # (N, D), N = B·T
        counted = None if is_token is None else is_token.flatten()
        routing = self.route(tokens)
        pairs = routing.experts.flatten()  # (N·k,): the expert of each (token, choice)
        if counted is not None:
            # An expert that does not exist: sorts last, and is run by nobody.
            pairs = pairs.masked_fill(~counted.repeat_interleave(self.k), len(self.experts))
        order = pairs.argsort(stable=True)
        load = pairs.bincount(minlength=len(self.experts) + 1)[: len(self.experts)].tolist()

        # Every expert is called, if with no rows: its gradient is then 0 rather than missing, which optimizers and
        # gradient synchronisation both count on.
        rows = order[: sum(load)]
        visits = tokens[rows // self.k].split(load)
        answers = torch.cat([expert(visit) for expert, visit in zip(self.experts, visits)])
        weights = routing.weights.flatten()[rows, None].to(x.dtype)
        mixed = torch.zeros_like(tokens).index_add(0, rows // self.k, answers.to(x.dtype) * weights)
        return mixed.view_as(x), balance_loss(routing, counted)

    def forward_grouped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` without padding, by `moe_groups.py`: no shape depends on the values of x."""
        tokens = x.flatten(0, -2)
        routing = self.route(tokens)
        mixed = run_experts(tokens, self.experts, routing.experts, routing.weights)
        return mixed.view_as(x), balance_loss(routing)

    def forward_reference(self, x: Tensor, is_token: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same, one token at a time. The definition, kept for tests."""
        tokens = x.flatten(0, -2)
        counted = torch.ones(len(tokens), dtype=torch.bool) if is_token is None else is_token.flatten()
        routing = self.route(tokens)
        mixed = torch.zeros_like(tokens)
        for n, token in enumerate(tokens):
            if counted[n]:
                for expert, weight in zip(routing.experts[n].tolist(), routing.weights[n]):
                    mixed[n] = mixed[n] + weight.to(x.dtype) * self.experts[expert](token)
        return mixed.view_as(x), balance_loss(routing, counted)

    def is_one_graph(self, device: torch.device) -> bool:
        """Whether a compiled block on `device` can be one graph, its experts included."""
        return device.type == "cpu" and can_group(self.experts)

    def route(self, tokens: Tensor) -> Routing:
        """Where `tokens` (N, D) would go."""
        return route(self.router(tokens), self.k, self.renormalize)
