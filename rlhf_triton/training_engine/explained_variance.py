"""How well a critic's values predict returns."""

import numpy as np

ROUNDING = 4 * float(np.finfo(np.float32).eps)  # relative; a row that a server scores twice may differ by this much


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """Return 1 - Var(returns - values) / Var(returns), computed in float64.

    1: the values predict the returns up to a constant; 0: no better than a constant; below 0: worse. It is 0, not
    NaN, if the returns do not vary beyond rounding or there are none. Pass Monte-Carlo returns, such as
    `gae(..., lam=1)[1]`: with a smaller lam the returns contain the values that they are compared with, and the result
    is too high.

    Args:
        values: `[N]`, V_t given the tokens up to t.
        returns: `[N]`, of the same tokens.
    """
    returns = returns.astype(np.float64)
    if not returns.size or returns.std() <= ROUNDING * abs(returns.mean()):
        return 0.0
    return float(1 - (returns - values).var() / returns.var())
