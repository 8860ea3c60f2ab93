"""The fixed cost of a forward pass: fitted to noisy times, within a time limit, and bounded."""

import importlib

import numpy as np
import pytest

cost = importlib.import_module("rlhf_triton.python_backend.serving.pass_cost")


class Machine:
    """A machine whose passes take `constant + slope x tokens` seconds plus up to 10 %; the first one `first_s` more."""

    def __init__(self, constant, slope, seed=0, first_s=0.0):
        self.now = 0.0
        self.sizes = []
        self._first_s = first_s
        self._constant = constant
        self._slope = slope
        self._noise = np.random.default_rng(seed)

    def run(self, num_rows, width):
        seconds = self._constant + self._slope * num_rows * width
        self.now += seconds * (1 + 0.1 * self._noise.random()) + self._first_s * (not self.sizes)
        self.sizes.append((num_rows, width))

    def overhead(self, token_budget=1024, longest=None):
        found = cost.fit_pass_cost(self.run, token_budget=token_budget, longest=longest, clock=lambda: self.now)
        return int(cost.overhead_tokens(found, token_budget))


@pytest.mark.parametrize(
    ("constant", "slope", "token_budget", "expected"),
    [
        (1e-3, 2e-5, 1024, (42, 58)),  # 7 M parameters on a core
        (1e-3, 1e-6, 1024, (256, 256)),  # no more than a quarter of the budget
        (0.0, 1e-5, 1024, (0, 4)),
        (0.01, 5e-6, 16_384, (1700, 2300)),  # a GPU
        (1e-3, 1e-5, 16, (64, 64)),  # one size only
    ],
)
def test_fit_recovers_overhead_tokens(constant, slope, token_budget, expected):
    for seed in range(9):
        machine = Machine(constant, slope, seed)
        assert expected[0] <= machine.overhead(token_budget) <= expected[1]
        assert all(rows * width <= token_budget for rows, width in machine.sizes)


@pytest.mark.parametrize("slope", [1e-5, 1e-3, 1e-2, 0.1, 10.0])
@pytest.mark.parametrize("first_s", [0.0, 1.5, 5.0])
def test_calibration_takes_at_most_two_seconds_after_the_first_pass(slope, first_s):
    machine = Machine(1e-3, slope, first_s=first_s)
    overhead = machine.overhead()
    assert machine.now <= 1.1 * (first_s + 1e-3 + 16 * slope) + 2.2, machine.sizes
    is_measured = slope < 0.1 and first_s < 2
    assert (overhead == 64) == (not is_measured)
    assert is_measured or len(machine.sizes) <= 2


def test_calibration_rows_stay_within_max_length():
    machine = Machine(1e-3, 1e-5)
    machine.overhead(longest=48)
    assert {width for _, width in machine.sizes} == {16, 48}


@pytest.mark.parametrize(("constant", "slope", "overhead"), [(2e-3, -1e-6, 256), (-1e-4, 2e-5, 0)])
def test_cost_of_a_pass_is_never_negative(constant, slope, overhead):
    """On a busy machine the measured times may suggest a negative cost; the log of a server's start shows the cost."""
    machine = Machine(constant, slope)
    found = cost.fit_pass_cost(machine.run, token_budget=1024, longest=None, clock=lambda: machine.now)
    assert min(found) == 0.0
    assert cost.overhead_tokens(found, 1024) == overhead
