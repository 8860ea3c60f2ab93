"""Triton's counters, once all earlier requests are in them."""

import time

from rlhf_triton.client.control_plane import ControlPlane, ModelStatistics

QUIET_S = 0.3


def settled_statistics(control: ControlPlane, model: str) -> ModelStatistics:
    """Return the model's counters once they no longer change: Triton counts a request after it has answered it."""
    found, since = control.statistics(model), time.monotonic()
    while time.monotonic() - since < QUIET_S:
        time.sleep(QUIET_S / 10)
        latest = control.statistics(model)
        if latest != found:
            found, since = latest, time.monotonic()
    return found
