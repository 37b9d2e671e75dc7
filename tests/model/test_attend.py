"""Who sees whom: the definition against a loop over heads and against torch, the fast route against the definition."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clockhand.model.attend import Visibility, attend, attend_reference


def draw_qkv(seed: int, batch: int, tokens: int, keys: int, heads: int, kv_heads: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, heads, 8), (batch, keys, kv_heads, 8), (batch, keys, kv_heads, 8)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def counting(batch: int, tokens: int) -> Tensor:
    return torch.arange(tokens).expand(batch, tokens)


def plain(batch: int, tokens: int, **more) -> Visibility:
    return Visibility(counting(batch, tokens), counting(batch, tokens), **more)


@st.composite
def visibilities(draw) -> Visibility:
    """Any call there can be: fresh, on a warm cache, padded, packed, with a window."""
    batch, tokens, window = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 6))
    manner = draw(st.sampled_from(["fresh", "warm", "padded", "packed"]))
    if manner == "warm":
        lengths = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch)))
        positions = lengths[:, None] + torch.arange(tokens)
        return Visibility(positions, counting(batch, int(positions.max()) + 1), window)
    positions = counting(batch, tokens)
    if manner == "padded":
        padding = torch.tensor(draw(st.lists(st.integers(0, tokens - 1), min_size=batch, max_size=batch)))
        positions = (positions - padding[:, None]).clamp(min=-1)
    if manner == "packed":
        documents = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))).cumsum(0)
        documents = documents.expand(batch, tokens)
        return Visibility(positions, positions, window, documents, documents)
    whole = manner == "fresh" and window == 0
    return Visibility(positions, positions, window, plainly_causal=whole and draw(st.booleans()))


# The kernels sum in another order. bf16 keeps 8 bits, and rounds q·k to them before the softmax in the definition
# but not in the kernel.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=40, deadline=None)
@given(sees=visibilities(), kv_heads=st.integers(1, 3), group=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_fast_route_equals_the_definition_in_values_and_gradients(dtype, sees, kv_heads, group, seed):
    (batch, tokens), keys = sees.query_positions.shape, sees.key_positions.shape[1]
    inputs = draw_qkv(seed, batch, tokens, keys, kv_heads * group, kv_heads, dtype)
    direction = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    results = []
    for route in (attend_reference, attend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = route(*leaves, sees)
        assert out.dtype == dtype
        results.append([out, *torch.autograd.grad((out * direction).sum(), leaves)])
    tolerance = TOLERANCES[dtype]
    scale = 1 + max(float(x.detach().abs().max()) for x in results[0])
    for expected, got in zip(*results):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale)


@settings(max_examples=25, deadline=None)
@given(sees=visibilities(), kv_heads=st.integers(1, 3), group=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_definition_is_a_softmax_over_the_keys_each_query_sees(sees, kv_heads, group, seed):
    """Head by head and query by query: head h reads KV head h // G (claim A21), and the rule is read out in words."""
    (batch, tokens), keys = sees.query_positions.shape, sees.key_positions.shape[1]
    q, k, v = draw_qkv(seed, batch, tokens, keys, kv_heads * group, kv_heads, torch.float64)
    result = attend_reference(q, k, v, sees)
    for b in range(batch):
        for t in range(tokens):
            p = int(sees.query_positions[b, t])
            if p < 0:
                continue
            seen = []
            for s in range(keys):
                at = int(sees.key_positions[b, s])
                same = sees.query_documents is None or sees.query_documents[b, t] == sees.key_documents[b, s]
                in_window = sees.window == 0 or p - at < sees.window
                if 0 <= at <= p and in_window and same:
                    seen.append(s)
            assert seen  # a token sees at least itself
            for h in range(kv_heads * group):
                weights = (k[b, seen, h // group] @ q[b, t, h] / math.sqrt(8)).softmax(0)
                torch.testing.assert_close(result[b, t, h], weights @ v[b, seen, h // group], rtol=0, atol=1e-12)


@pytest.mark.parametrize("route", [attend, attend_reference])
def test_repeating_each_kv_head_equals_grouping(route):
    q, k, v = draw_qkv(0, 2, 6, 6, 6, 2)
    sees = plain(2, 6)
    grouped = route(q, k, v, sees)
    torch.testing.assert_close(route(q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2), sees), grouped)
    # Control: the heads repeated in the other order, 0 1 0 1 0 1 in place of 0 0 0 1 1 1.
    assert not torch.allclose(route(q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1), sees), grouped, atol=0.01)


@pytest.mark.parametrize("route", [attend, attend_reference])
def test_a_whole_prompt_is_torch_s_own_causal_attention(route):
    q, k, v = draw_qkv(0, 2, 6, 6, 4, 4)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(route(q, k, v, plain(2, 6)), expected)
    torch.testing.assert_close(route(q, k, v, plain(2, 6, plainly_causal=True)), expected)


def test_the_mask_of_five_tokens_is_a_triangle():
    assert torch.equal(plain(1, 5).mask[0], torch.ones(5, 5).tril().bool())  # claim B10


def test_a_window_of_three_is_a_band_and_documents_are_blocks():
    band = torch.ones(5, 5).tril().triu(-2).bool()
    assert torch.equal(plain(1, 5, window=3).mask[0], band)
    documents = torch.tensor([[7, 7, 7, 4, 4]])
    blocks = torch.block_diag(torch.ones(3, 3).tril(), torch.ones(2, 2).tril()).bool()
    assert torch.equal(plain(1, 5, query_documents=documents, key_documents=documents).mask[0], blocks)


def test_several_tokens_on_a_warm_cache_see_the_past_and_the_earlier_among_themselves():
    sees = Visibility(torch.tensor([[3, 4]]), counting(1, 5))
    assert sees.mask[0].tolist() == [[True, True, True, True, False], [True, True, True, True, True]]


@pytest.mark.parametrize("route", [attend, attend_reference])
@pytest.mark.parametrize("huge", [1e30, -1e30])
def test_a_masked_key_has_weight_exactly_zero(route, huge):
    """Not nearly zero: a future value of 1e30 leaves no trace (claim A18)."""
    q, k, v = draw_qkv(0, 1, 5, 5, 2, 1)
    sees = plain(1, 5)
    before = route(q, k, v, sees)
    k[:, 3:], v[:, 3:] = huge, huge
    after = route(q, k, v, sees)
    assert torch.equal(after[:, :3], before[:, :3])
    assert not torch.equal(after[:, 3:], before[:, 3:])


@pytest.mark.parametrize("route", [attend, attend_reference])
def test_padding_has_finite_output_and_sends_no_gradient_that_is_nan(route):
    q, k, v = (x.requires_grad_() for x in draw_qkv(0, 1, 4, 4, 2, 2))
    positions = torch.tensor([[-1, -1, 0, 1]])
    out = route(q, k, v, Visibility(positions, positions))
    assert out.isfinite().all()
    out[:, 2:].sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
        assert torch.equal(x.grad[:, :2], torch.zeros_like(x.grad[:, :2]))


@pytest.mark.parametrize("route", [attend, attend_reference])
def test_a_given_scale_replaces_one_over_root_head_dim(route):
    q, k, v = draw_qkv(0, 1, 4, 4, 2, 2)
    sees = plain(1, 4)
    torch.testing.assert_close(route(q, k, v, sees, scale=2 / math.sqrt(8)), route(2 * q, k, v, sees))
    assert not torch.allclose(route(q, k, v, sees, scale=1.0), route(q, k, v, sees), atol=0.01)


def test_the_weights_of_a_bf16_model_are_rounded_once_not_at_every_step():
    """With the identity for values, what comes out is the weights (claim B11)."""
    q, k, _ = draw_qkv(0, 1, 128, 128, 1, 1, torch.bfloat16)
    identity = torch.eye(128, dtype=torch.bfloat16)[None, :, None]
    q, k = (F.pad(x, (0, 120)) for x in (q, k))  # (1, 128, 1, 128)
    sees = Visibility(torch.full((1, 128), 127), counting(1, 128))
    weights = attend_reference(q, k, identity, sees)[0, :, 0]

    scores = torch.einsum("tc,sc->ts", q[0, :, 0], k[0, :, 0]) * (1 / math.sqrt(128))
    exact = scores.double().softmax(-1)
    torch.testing.assert_close(weights.double(), exact, rtol=2**-8, atol=0)  # half a unit in the last of 8 bits
    exponentials = scores.exp()
    in_bf16 = exponentials / exponentials.sum(-1, keepdim=True)  # control
    assert ((in_bf16.double() / exact) - 1).abs().max() > 2**-7
