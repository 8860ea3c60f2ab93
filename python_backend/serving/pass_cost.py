"""Fits `seconds = a + b x tokens` to a few forward passes of a model that was just loaded. Imports no torch."""

from collections.abc import Callable

import numpy as np

MIN_TOKENS = 16
MAX_WIDTH = 512  # tokens of a row; larger passes have more rows
BUDGET_S = 2.0  # after the warm-up
ROUNDS = 5
UNMEASURED = 64  # overhead in tokens if there was no time to measure two sizes
GROWTH = 4  # ratio of successive sizes; also predicts the time of the next size


def fit_pass_cost(
    run: Callable[[int, int], object], *, token_budget: int, longest: int | None, clock: Callable[[], float]
) -> tuple[float, float] | None:
    """Return (a, b) in seconds, the fixed cost and the cost per token, >= 0; None: passes are too slow to measure.

    Args:
        run: runs a forward pass, given the number of rows and the tokens per row.
        longest: maximum tokens of a row; None: unlimited.
    """
    started = clock()
    run(1, min(MIN_TOKENS, longest or MIN_TOKENS))  # warm-up, so that the first request does not wait for it
    began = clock()
    if began - started > BUDGET_S:
        return None
    fastest: dict[int, float] = {}
    for _ in range(ROUNDS):
        last_s = 0.0
        tokens = MIN_TOKENS
        while tokens <= token_budget:
            width = min(tokens, MAX_WIDTH, longest or MAX_WIDTH)
            size = tokens // width * width
            started = clock()
            if started - began + fastest.get(size, GROWTH * last_s) > BUDGET_S:
                break
            run(tokens // width, width)
            last_s = clock() - started
            fastest[size] = min(last_s, fastest.get(size, last_s))
            tokens *= GROWTH
    if len(fastest) < 2:
        return None
    sizes = list(fastest)
    seconds = np.array(list(fastest.values()))
    slope, constant = np.polyfit(sizes, seconds, 1, w=1 / seconds)  # relative errors: small passes show the constant
    return max(0.0, float(constant)), max(0.0, float(slope))  # on a busy machine, the fit may be negative


def overhead_tokens(cost: tuple[float, float] | None, token_budget: int) -> int:
    """Return a forward pass's fixed cost, converted to tokens: at most a quarter of the budget."""
    if cost is None:
        return UNMEASURED
    constant, slope = cost
    most = token_budget // 4
    return min(most, round(constant / slope)) if slope > 0 else most
