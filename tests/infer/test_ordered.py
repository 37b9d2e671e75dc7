"""Products with matrices in an order of their own are those of F.linear."""

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.infer import ordered
from clockhand.infer.ordered import OneDNN, Panels, Unsorted, order_of

DTYPES = [torch.float32, torch.bfloat16]


def config(**changes):
    return ModelConfig(**{**dict(vocab_size=50, d_model=32, n_layers=1, n_heads=4, d_ff=48), **changes})


def orders(dtype):
    """Those there are on this machine."""
    best = order_of(config(), dtype)
    return {Panels: [best, OneDNN(), Unsorted()], OneDNN: [best, Unsorted()], Unsorted: [best]}[type(best)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 15, 16, 31, 32, 50, 96])
@pytest.mark.parametrize("width", [2, 30, 48])
def test_whatever_the_order_and_the_sizes_the_product_is_the_same(outputs, width, dtype):
    torch.manual_seed(0)
    matrices = torch.randn(3, outputs, width).to(dtype)
    for order in orders(dtype):
        in_order = order.sort(matrices)
        for rows in (0, 2, 3, 7, 8, 9, 16, 29, 70):
            x = torch.randn(rows, width).to(dtype)
            for matrix, here in zip(matrices, in_order):
                # Sums of up to 48 products of about 1, in another order; bf16 is rounded at the end, to 8 bits.
                torch.testing.assert_close(
                    order.product(x, here).double(),
                    x.double() @ matrix.double().T,
                    **(dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=1e-5, rtol=2**-8)),
                )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype):
    if type(order := order_of(config(), dtype)) is Unsorted:
        pytest.skip("F.linear promises no such thing")
    if type(order) is OneDNN and dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        pytest.skip("oneDNN takes tiles for many rows and not for few")
    torch.manual_seed(0)
    (matrix,) = order.sort(torch.randn(1, 150, 512).to(dtype))
    x = torch.randn(70, 512).to(dtype)
    whole = order.product(x, matrix)
    for rows in (2, 5, 8, 13, 32, 69):
        assert torch.equal(order.product(x[-rows:], matrix), whole[-rows:])


def test_rows_that_do_not_lie_one_behind_the_other_are_multiplied_too():
    (matrix,) = (order := order_of(config(), torch.float32)).sort(torch.randn(1, 40, 16))
    x = torch.randn(16, 6)
    assert torch.equal(order.product(x.T, matrix), order.product(x.T.contiguous(), matrix))


def test_a_model_whose_widths_are_no_whole_words_in_bf16_is_left_to_onednn():
    odd = config(d_ff=47)
    assert type(order_of(odd, torch.bfloat16)) is not Panels
    assert type(order_of(odd, torch.float32)) is type(order_of(config(), torch.float32))
    assert type(order_of(config(), torch.float16)) is Unsorted


def test_without_c_plus_plus_onednn_takes_its_place(monkeypatch):
    monkeypatch.setattr(ordered, "native", lambda: None)
    assert type(order_of.__wrapped__(config(), torch.float32)) is not Panels
