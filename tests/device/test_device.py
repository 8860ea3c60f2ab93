"""The simulated device itself: devices kept apart, memory and host waits counted, streams and threads told apart."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import simcuda
import torch
from simulated_cuda.device import memory_limit
from simulated_cuda.threads import recorded_launches
from simulated_cuda.trace import Trace


def test_tensors_of_several_devices_do_not_meet():
    here, there, host = (torch.ones(3, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    for other in (there, host):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + other
    assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a scalar of the host may
    assert here[torch.tensor([0, 2])].tolist() == [1, 1]  # and an index
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="cuda", generator=torch.Generator())


def test_memory_is_counted_by_card_and_ends_at_its_limit():
    before = torch.cuda.memory_allocated(2)
    torch.cuda.reset_peak_memory_stats(2)
    kept = torch.zeros(100, device="cuda:2")
    del kept
    kept = torch.zeros(50, dtype=torch.bfloat16, device="cuda:2")
    assert torch.cuda.memory_allocated(2) - before == 100
    assert torch.cuda.max_memory_allocated(2) - before == 400
    free, total = torch.cuda.mem_get_info(2)
    assert total - free == torch.cuda.memory_allocated("cuda:2")
    limit = torch.cuda.memory_allocated(2) + 1000
    with memory_limit(2, limit):
        assert torch.cuda.mem_get_info(2) == (1000, limit)
        assert torch.cuda.get_device_properties(2).total_memory == limit
        large = torch.zeros(200, device="cuda:2")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            large.clone()
    assert large.clone().sum() == kept.sum() == 0


def test_the_host_waits_for_copies_unless_non_blocking_and_pinned_and_for_results():
    card, pageable, pinned = torch.ones(3, device="cuda"), torch.ones(3), torch.ones(3).pin_memory()
    mask = torch.ones(3, dtype=torch.bool, device="cuda")
    assert (pinned.is_pinned(), pinned[1:].is_pinned(), pageable.is_pinned()) == (True, True, False)
    expected: list[tuple[Callable[[], object], dict[str, int]]] = [
        (lambda: pinned.to("cuda", non_blocking=True), {}),
        (lambda: card.copy_(pinned, non_blocking=True), {}),
        (lambda: pinned.copy_(card, non_blocking=True), {}),
        (lambda: card.to("cpu", non_blocking=True), {}),  # into pinned memory of its own
        (lambda: pinned.to("cuda"), {"copy to the device": 1}),
        (lambda: card.cpu(), {"copy to the host": 1}),
        (lambda: pageable.to("cuda", non_blocking=True), {"copy to the device, pageable memory": 1}),
        (lambda: pageable.copy_(card, non_blocking=True), {"copy to the host, pageable memory": 1}),
        (lambda: card.sum().item(), {"item()/float()/bool()": 1}),
        (lambda: card[mask], {"index with a mask": 1}),
        (lambda: card[torch.tensor([1])], {"index with an index on the host": 1}),
        (lambda: card.nonzero(), {"nonzero": 1}),
        (lambda: torch.tensor([1.0], device="cuda"), {"torch.tensor() on the device": 1}),
        (lambda: torch.as_tensor(np.ones(2), device="cuda"), {"copy to the device": 1}),
        (lambda: torch.full((2,), 1.0, device="cuda"), {}),
        (torch.cuda.synchronize, {"cuda.synchronize": 1}),
        (torch.cuda.Event().synchronize, {"event.synchronize": 1}),
        (torch.cuda.Stream().synchronize, {"stream.synchronize": 1}),
    ]
    for work, waits in expected:
        with Trace(places=False) as trace:
            work()
        assert dict(trace.waits) == waits


def test_kernels_are_counted_also_in_a_backward_pass_and_views_are_not():
    weight, before = torch.ones(3, device="cuda", requires_grad=True), simcuda.kernels(0)
    with Trace() as trace:
        (weight[None] * 2).sum().backward()
    assert trace.ops == {"mul": 2, "sum": 1, "ones_like": 1}
    assert trace.kernels == simcuda.kernels(0) - before


def test_a_product_of_bfloat16_matrices_in_float32_is_as_on_cuda():
    left, right = (torch.randn(4, 4, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.mm(left, right, out_dtype=torch.float32)
    assert product.device.type == "cuda"
    torch.testing.assert_close(product, left.float() @ right.float(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="out_dtype"):
        torch.mm(left.float(), right.float(), out_dtype=torch.float64)


def test_a_stream_is_current_in_its_block_and_thread_and_in_the_backward_pass_of_its_work():
    stream, weight = torch.cuda.Stream(device="cuda:1"), torch.ones(2, device="cuda:1", requires_grad=True)
    elsewhere = []
    with Trace() as trace, torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream == torch.cuda.current_stream("cuda:1")
        assert torch.cuda.current_device() == 1
        thread = threading.Thread(target=lambda: elsewhere.append(torch.cuda.current_stream(1)))
        thread.start()
        thread.join()
        loss = (weight * 2).sum()
    assert (torch.cuda.current_device(), elsewhere) == (0, [torch.cuda.default_stream(1)])
    assert set(trace.streams) == {(1, stream.stream_id)}
    with Trace() as trace:
        torch.autograd.grad(loss, weight)
    assert trace.streams[1, stream.stream_id] == 1


def test_a_thread_starts_on_the_first_card():
    def work(card: int | None) -> None:
        if card is not None:
            torch.cuda.set_device(card)
        torch.ones(2, device="cuda:3") + 1

    with recorded_launches() as record:
        for name, card in (("careless", None), ("careful", 3)):
            thread = threading.Thread(target=work, args=(card,), name=name)
            thread.start()
            thread.join()
    assert [(each.thread, each.current, each.card) for each in record.strays] == [("careless", 0, 3)]
    assert {each.thread for each in record.launches} == {"careless", "careful"}
