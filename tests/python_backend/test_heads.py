"""`python_backend.models.heads`: hand-made numbers."""

from __future__ import annotations

import torch

from python_backend.models.heads import merge_attributes, pool_last, pool_mean, standardise

# [B=2, S=3, A=2]
OUTPUTS = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]], [[4.0, 40.0], [6.0, 60.0], [9.0, float("nan")]]])
LENGTHS = torch.tensor([3, 2])


def test_the_last_token_is_at_length_minus_1():
    assert pool_last(OUTPUTS, LENGTHS).tolist() == [[3.0, 30.0], [6.0, 60.0]]
    assert pool_last(OUTPUTS, torch.tensor([1, 1])).tolist() == [[1.0, 10.0], [4.0, 40.0]]


def test_the_mean_is_over_the_rows_own_tokens():
    assert pool_mean(OUTPUTS, LENGTHS).tolist() == [[2.0, 20.0], [5.0, 50.0]]  # what padding holds never counts


def test_a_mean_of_the_heads_outputs_is_the_head_of_the_mean():
    torch.manual_seed(0)
    hidden, head, lengths = torch.randn(4, 7, 5), torch.nn.Linear(5, 3), torch.tensor([7, 1, 4, 6])
    slow = torch.stack([head(row[:n].mean(dim=0)) for row, n in zip(hidden, lengths.tolist(), strict=True)])
    torch.testing.assert_close(pool_mean(head(hidden), lengths), slow)


def test_merging_is_a_weighted_sum():
    merged = merge_attributes(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, -1.0]))
    assert merged.tolist() == [[-1.5], [-2.5]]


def test_standardising_subtracts_before_it_divides():
    assert standardise(torch.tensor([1.0, 5.0]), 1.0, 2.0).tolist() == [0.0, 2.0]
