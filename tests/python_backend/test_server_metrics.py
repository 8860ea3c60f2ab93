"""Metrics outlive the model that counts: one that Triton's stub frees at unload ends its process with a segfault."""

from __future__ import annotations

import gc
import weakref

import pytest
import triton_python_backend_utils as stub

from python_backend.serving.triton import Gauge, MetricCounters


def test_a_family_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    families: list[weakref.ref[stub.MetricFamily]] = []
    metric = stub.MetricFamily()

    class Family(stub.MetricFamily):
        def __init__(self, **settings: object) -> None:
            super().__init__(**settings)
            families.append(weakref.ref(self))

        def Metric(self, **_: object) -> stub.MetricFamily:  # the real one does not hold its family either
            return metric

    monkeypatch.setattr(stub, "MetricFamily", Family)
    made = [MetricCounters("critic", {"one": "", "two": ""}), Gauge("critic", "three", "")]
    monkeypatch.undo()
    del made
    gc.collect()
    assert len(families) == 3
    assert all(family() is not None for family in families)
