"""`--deterministic`: fixed kernels while the run lasts, the same number of threads, and a line where it cannot be."""

import dataclasses

import pytest
import torch

from clockhand.errors import ClockhandError
from clockhand.train.determinism import deterministic
from clockhand.train.loop import train
from clockhand.train.progress import Reporter


class Asks(Reporter):
    def __init__(self) -> None:
        self.answers: set[bool] = set()

    def row(self, row) -> None:
        self.answers.add(torch.are_deterministic_algorithms_enabled())


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("experts", [0, 4])
def test_fixed_kernels_are_used_while_the_run_lasts_and_change_no_bit_on_the_cpu(
    model_config, train_config, corpus, tmp_path, weights_of, wanted, experts
):
    model = dataclasses.replace(model_config, **({"n_experts": experts, "n_experts_per_token": 2} if experts else {}))
    reporter = Asks()
    train(model, dataclasses.replace(train_config, deterministic=wanted), corpus, tmp_path / "run", reporter)
    assert reporter.answers == {wanted}
    assert not torch.are_deterministic_algorithms_enabled()
    train(model, train_config, corpus, tmp_path / "plain")
    assert torch.equal(weights_of(tmp_path / "run"), weights_of(tmp_path / "plain"))


def test_another_number_of_threads_is_refused_because_it_adds_in_another_order(
    model_config, train_config, corpus, tmp_path
):
    config = dataclasses.replace(train_config, deterministic=True)
    train(model_config, config, corpus, tmp_path / "run")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ClockhandError, match=f"started with {threads} threads, not {threads + 1}: set OMP_NUM_TH"):
            train(model_config, dataclasses.replace(config, steps=12), corpus, tmp_path / "run")
    finally:
        torch.set_num_threads(threads)
    train(model_config, dataclasses.replace(config, steps=12), corpus, tmp_path / "run")


def test_an_operation_that_has_no_fixed_order_is_one_line():
    with (
        pytest.raises(ClockhandError, match=r"deterministic = True cannot be honoured: .*deterministic"),
        deterministic(True),
    ):
        torch.nn.functional.max_unpool1d(torch.ones(1, 1, 2), torch.tensor([[[0, 1]]]), 2)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="another fault"), deterministic(True):
        raise RuntimeError("another fault")
