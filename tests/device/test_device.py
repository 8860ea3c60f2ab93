"""The simulated device: separate devices, counted memory and host synchronisations, streams and threads."""

import threading

import numpy as np
import pytest
import torch
from simulated_cuda.threads import recorded_launches
from simulated_cuda.trace import Trace


def test_simulated_devices_refuse_operations_across_devices():
    here, there, host = (torch.ones(3, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    for other in (there, host):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + other
    assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a scalar of the host may
    assert here[torch.tensor([0, 2])].tolist() == [1, 1]  # and an index
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="cuda", generator=torch.Generator())


def test_simulated_device_counts_host_synchronisations():
    gpu = torch.ones(3, device="cuda")
    pageable = torch.ones(3)
    pinned = torch.ones(3).pin_memory()
    mask = torch.ones(3, dtype=torch.bool, device="cuda")
    assert (pinned.is_pinned(), pinned[1:].is_pinned(), pageable.is_pinned()) == (True, True, False)
    expected = [
        (lambda: pinned.to("cuda", non_blocking=True), {}),
        (lambda: gpu.copy_(pinned, non_blocking=True), {}),
        (lambda: pinned.copy_(gpu, non_blocking=True), {}),
        (lambda: gpu.to("cpu", non_blocking=True), {}),  # into pinned memory of its own
        (lambda: pinned.to("cuda"), {"copy to the device": 1}),
        (lambda: gpu.cpu(), {"copy to the host": 1}),
        (lambda: pageable.to("cuda", non_blocking=True), {"copy to the device, pageable memory": 1}),
        (lambda: pageable.copy_(gpu, non_blocking=True), {"copy to the host, pageable memory": 1}),
        (lambda: gpu.sum().item(), {"item()/float()/bool()": 1}),
        (lambda: gpu[mask], {"index with a mask": 1}),
        (lambda: gpu[torch.tensor([1])], {"index with an index on the host": 1}),
        (lambda: gpu.nonzero(), {"nonzero": 1}),
        (lambda: torch.tensor([1.0], device="cuda"), {"torch.tensor() on the device": 1}),
        (lambda: torch.as_tensor(np.ones(2), device="cuda"), {"copy to the device": 1}),
        (lambda: torch.full((2,), 1.0, device="cuda"), {}),
        (torch.cuda.synchronize, {"cuda.synchronize": 1}),
    ]
    for work, waits in expected:
        with Trace(places=False) as trace:
            work()
        assert dict(trace.waits) == waits


def test_simulated_device_starts_threads_on_the_first_gpu():
    def work(gpu):
        if gpu is not None:
            torch.cuda.set_device(gpu)
        torch.ones(2, device="cuda:3") + 1

    with recorded_launches() as record:
        for name, gpu in (("careless", None), ("careful", 3)):
            thread = threading.Thread(target=work, args=(gpu,), name=name)
            thread.start()
            thread.join()
    assert [(each.thread, each.current, each.gpu) for each in record.strays] == [("careless", 0, 3)]
    assert {each.thread for each in record.launches} == {"careless", "careful"}
