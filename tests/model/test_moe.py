"""Mixture of experts: the grouped dispatch against the loop over tokens, the routing rule, the balance loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from clockhand.model.attend import Visibility
from clockhand.model.moe import MixtureOfExperts, Routing, balance_loss, route
from clockhand.model.moe_groups import ROWS, _products, _products_over_rows, group
from clockhand.model.transformer import run_block


@pytest.fixture(scope="session")
def make_moe(make_model):
    """A layer of experts with large weights. `balance_loss` of its forward has no coefficient yet."""

    def make(n_experts: int, k: int, renormalize: bool = True, **changes) -> MixtureOfExperts:
        settings = dict(n_experts=n_experts, n_experts_per_token=k, renormalize_top_k=renormalize, n_layers=1)
        return make_model(**settings, **changes).blocks[0].mlp

    return make


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def answers_and_gradients(moe: MixtureOfExperts, forward, x: Tensor, is_token: Tensor | None) -> list[Tensor]:
    """The answer, the balance loss, and the gradient of both together for the input and every parameter."""
    moe.zero_grad()
    x = x.clone().requires_grad_()
    mixed, balance = forward(x, is_token)
    ((mixed * draw(7, *mixed.shape)).sum() + balance).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in moe.parameters()]
    return [mixed, balance, x.grad, *gradients]


@settings(max_examples=30, deadline=None)
@given(
    n_experts=st.integers(1, 6),
    data=st.data(),
    renormalize=st.booleans(),
    tokens=st.integers(1, 9),
    padded=st.booleans(),
    mlp=st.sampled_from(["swiglu", "gelu"]),
)
def test_the_dispatch_by_expert_equals_the_loop_over_tokens_in_values_and_gradients(
    make_moe, n_experts, data, renormalize, tokens, padded, mlp
):
    moe = make_moe(n_experts, data.draw(st.integers(1, n_experts)), renormalize, mlp=mlp)
    seed = data.draw(st.integers(0, 99))
    x = draw(seed, 2, tokens, 24)
    is_token = draw(seed + 1, 2, tokens) > 0 if padded else None  # sometimes none is left
    fast = answers_and_gradients(moe, moe.forward, x, is_token)
    plain = answers_and_gradients(moe, moe.forward_reference, x, is_token)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)  # fp32 sums of 24 terms of size 10 to 100


@settings(max_examples=30, deadline=None)
@given(
    n_experts=st.integers(1, 6),
    data=st.data(),
    renormalize=st.booleans(),
    tokens=st.integers(1, 70),
    mlp=st.sampled_from(["swiglu", "gelu"]),
)
def test_experts_in_groups_of_rows_equal_the_dispatch_in_values_and_gradients(
    make_moe, n_experts, data, renormalize, tokens, mlp
):
    moe = make_moe(n_experts, data.draw(st.integers(1, n_experts)), renormalize, mlp=mlp)
    x = draw(data.draw(st.integers(0, 99)), 1, tokens, 24)
    grouped = answers_and_gradients(moe, lambda x, _: moe.forward_grouped(x), x, None)
    plain = answers_and_gradients(moe, moe.forward, x, None)
    # fp32 sums of 24 terms of size 10 to 100, and for a matrix of as many as there are tokens.
    torch.testing.assert_close(grouped, plain, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("chosen", [[[2], [2], [0], [2]], [[1, 0], [1, 2]]])
def test_rows_of_an_expert_lie_together_and_are_padded(chosen):
    chosen = torch.tensor(chosen)
    grouping = group(chosen, 4)
    for pair, (expert, row) in enumerate(zip(chosen.flatten(), grouping.row_of_pair.flatten())):
        assert grouping.pair_of_row[row] == pair
        begin = grouping.ends[expert - 1] if expert else 0
        assert begin <= row < grouping.ends[expert]
    assert (grouping.ends % ROWS == 0).all()
    assert grouping.ends[3] == grouping.ends[2], "expert 3 has no rows"
    assert (grouping.pair_of_row < chosen.numel()).sum() == chosen.numel()


def test_the_number_of_rows_does_not_depend_on_who_chooses_what():
    """The most are needed when every expert has one row more than it has whole groups."""
    for k, n_experts in ((1, 4), (2, 4), (3, 8)):
        for tokens in (1, 11, 64, 97):
            sizes = set()
            for seed in range(5):
                chosen = draw(seed, tokens, n_experts).topk(k).indices
                grouping = group(chosen, n_experts)
                assert grouping.ends[-1] <= len(grouping.pair_of_row)
                sizes.add(len(grouping.pair_of_row))
            assert len(sizes) == 1


def test_an_expert_nobody_visits_has_a_gradient_of_zero_in_groups_too(make_moe):
    moe = make_moe(4, 1)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2] = 1.0
    moe.forward_grouped(draw(0, 1, 3, 24).abs())[0].sum().backward()
    for number, expert in enumerate(moe.experts):
        assert all(bool(parameter.grad.any()) == (number == 2) for parameter in expert.parameters())


def test_a_compiled_block_with_experts_is_one_graph_and_runs_them_in_groups(make_model):
    block = make_model(n_experts=4, n_experts_per_token=2).blocks[0].train()
    x = draw(0, 2, 19, 24)
    positions = torch.arange(19).expand(2, 19)
    sees = Visibility(positions, positions, plainly_causal=True, in_order=True)
    sees.bias  # noqa: B018 - made before, as training does it
    expected = block(x, None, sees, None, None, 0)
    compiled = torch.compile(run_block, backend="aot_eager", fullgraph=True)  # a break in the graph raises
    found = compiled(block, x, None, sees, None, None, 0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found[0].sum().backward()


def test_the_hidden_products_keep_the_promises_that_the_compiler_was_given():
    rows, slopes, ends = draw(0, 96, 5), draw(1, 96, 3), torch.tensor([32, 32, 64])
    opcheck(_products, (rows, [draw(seed, 5, 3) for seed in range(3)], ends))
    opcheck(_products_over_rows, (slopes.bfloat16(), rows.bfloat16(), ends, torch.float32))


def test_experts_with_biases_are_not_grouped(make_moe):
    cpu = torch.device("cpu")
    assert make_moe(2, 1).is_one_graph(cpu)
    assert not make_moe(2, 1, mlp_bias=True).is_one_graph(cpu)


def test_an_expert_nobody_visits_has_a_gradient_of_zero_not_none(make_moe):
    moe = make_moe(4, 1)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2] = 1.0  # with positive inputs, expert 2 always wins
    mixed, _ = moe(draw(0, 1, 3, 24).abs())
    mixed.sum().backward()
    for number, expert in enumerate(moe.experts):
        for parameter in expert.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) == (number == 2)


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(5)), k=st.integers(1, 5), seed=st.integers(0, 99))
def test_the_order_of_the_experts_does_not_matter(make_moe, order, k, seed):
    moe, shuffled = make_moe(5, k), make_moe(5, k)
    with torch.no_grad():
        shuffled.router.weight.copy_(moe.router.weight[list(order)])
        for new, old in enumerate(order):
            shuffled.experts[new].load_state_dict(moe.experts[old].state_dict())
    x = draw(seed, 2, 4, 24)
    torch.testing.assert_close(shuffled(x), moe(x), rtol=1e-4, atol=1e-4)
    if list(order) != sorted(order):  # control: the experts shuffled without their router rows
        shuffled.router.load_state_dict(moe.router.state_dict())
        assert not torch.allclose(shuffled(x)[0], moe(x)[0], atol=0.01)


def test_k_equal_to_all_experts_is_the_mixture_by_probability(make_moe):
    moe = make_moe(3, 3)
    x = draw(0, 1, 4, 24)
    probabilities = moe.router(x).softmax(-1)
    expected = sum(probabilities[..., e, None] * expert(x) for e, expert in enumerate(moe.experts))
    torch.testing.assert_close(moe(x)[0], expected, rtol=1e-4, atol=1e-4)


# ── padding ────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=15, deadline=None)
@given(k=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_content_of_padding_changes_nothing(make_moe, k, seed):
    moe = make_moe(4, k)
    x, is_token = draw(seed, 2, 6, 24), torch.ones(2, 6, dtype=torch.bool)
    is_token[0, :4], is_token[1, 5] = False, False
    mixed, balance = moe(x, is_token)
    x[~is_token] = 100 * draw(seed + 1, 5, 24)
    mixed_after, balance_after = moe(x, is_token)
    assert torch.equal(mixed, mixed_after)
    assert torch.equal(balance, balance_after)
    assert torch.equal(mixed[~is_token], torch.zeros(5, 24))
    assert not torch.equal(balance, moe(x)[1])  # control: counted, it would have changed the balance


def test_padding_is_sent_to_no_expert(make_moe):
    moe, visits = make_moe(3, 2), []
    for expert in moe.experts:
        expert.register_forward_pre_hook(lambda _, arguments: visits.append(len(arguments[0])))
    is_token = torch.tensor([[False, False, True, True, True]])
    moe(draw(0, 1, 5, 24), is_token)
    assert sum(visits) == 3 * 2


def test_a_batch_of_nothing_but_padding_has_balance_loss_zero(make_moe):
    mixed, balance = make_moe(3, 2)(draw(0, 2, 3, 24), torch.zeros(2, 3, dtype=torch.bool))
    assert not mixed.any()
    assert balance == 0


# ── routing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_numbers_of_claim_b15():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for renormalize, expected in ((True, [0.731059, 0.268941]), (False, [0.643914, 0.236883])):
        routing = route(logits, k=2, renormalize=renormalize)
        assert routing.experts.tolist() == [[0, 1]]
        torch.testing.assert_close(routing.weights, torch.tensor([expected]), rtol=0, atol=1e-6)


def test_a_single_renormalised_expert_sends_the_router_no_gradient(make_moe):
    """Claim B15: its weight is 1 whatever the router says, so only the balance loss trains the router."""
    gradients = {}
    for renormalize in (True, False):
        moe = make_moe(4, 1, renormalize)
        mixed, balance = moe(draw(0, 2, 5, 24))
        (gradients[renormalize],) = torch.autograd.grad(mixed.square().sum(), moe.router.weight, retain_graph=True)
        (of_balance,) = torch.autograd.grad(balance, moe.router.weight)
        assert of_balance.abs().max() > 1e-4
    assert gradients[True].abs().max() < 1e-5 * gradients[False].abs().max()  # w/w has a rounding error's gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_routing_is_decided_in_fp32(dtype):
    routing = route(torch.zeros(2, 3, dtype=dtype), k=2, renormalize=True)
    assert routing.probabilities.dtype == routing.weights.dtype == torch.float32


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_half_precision_layer_answers_in_its_own_type(make_moe, renormalize):
    moe = make_moe(4, 2, renormalize)
    x = draw(0, 2, 5, 24)
    wide = moe(x)[0]
    moe = moe.bfloat16()
    narrow, balance = moe(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert balance.dtype == torch.float32
    plain = moe.forward_reference(x.bfloat16())[0]
    torch.testing.assert_close(narrow, plain, rtol=0.02, atol=0.02 * wide.abs().max().item())  # 8 bits, k = 2 sums


# ── balance loss ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n_experts", [1, 2, 4, 6])
def test_the_balance_loss_is_1_at_perfect_balance_for_any_k(n_experts):
    for k in range(1, n_experts + 1):
        # Token n prefers expert n, then n+1, ...: every expert is chosen equally often with equal mean probability.
        logits = torch.stack([torch.arange(n_experts).float().roll(shift) for shift in range(n_experts)])
        assert float(balance_loss(route(logits, k, renormalize=True))) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("n_experts", [2, 4, 6])
def test_the_balance_loss_is_the_number_of_experts_when_one_takes_all(n_experts):
    logits = torch.full((8, n_experts), -50.0)
    logits[:, 0] = 50
    assert float(balance_loss(route(logits, 1, renormalize=True))) == pytest.approx(n_experts, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(n_experts=st.integers(1, 5), data=st.data(), seed=st.integers(0, 99))
def test_tokens_left_out_of_the_balance_loss_are_as_if_absent(n_experts, data, seed):
    k = data.draw(st.integers(1, n_experts))
    logits, counted = draw(seed, 12, n_experts), draw(seed + 1, 12) > 0
    if counted.any():
        torch.testing.assert_close(
            balance_loss(route(logits, k, True), counted), balance_loss(route(logits[counted], k, True))
        )


def test_the_balance_loss_pushes_the_most_loaded_expert_down():
    logits = torch.tensor([[1.0, 0.0, 0.0]]).repeat(6, 1).requires_grad_()
    balance_loss(route(logits, 1, renormalize=True)).backward()
    assert (logits.grad[:, 0] > 0).all()
    assert (logits.grad[:, 1:] < 0).all()


def test_routing_names_the_most_probable_expert_first():
    routing = route(draw(0, 20, 6), k=3, renormalize=False)
    assert isinstance(routing, Routing)
    torch.testing.assert_close(routing.probabilities.gather(1, routing.experts), routing.weights)
    assert (routing.weights.diff(dim=-1) <= 0).all()
    assert torch.equal(routing.experts[:, 0], routing.probabilities.argmax(-1))
