"""Simulated NVIDIA GPUs for a CPU build of torch: `make test-device` runs the device's code on them.

Tensors of `cuda:N` lie in host memory and are computed by the CPU's kernels, but meet tensors of other devices only
where CUDA allows it. The memory of each GPU is counted and can be limited, threads have a current GPU and a current
stream, `nccl` is a backend for their tensors, and `Trace` counts kernels and where the host waits for a GPU.

What it cannot show:

* races and wrong results of asynchronous work: a kernel is finished when its launch returns, whatever its stream;
* the order of streams: events and waits between streams have no effect, only the identity of a stream is real;
* kernels: speed, missing or other CUDA kernels, the one that SDPA chooses, torch.compile, CUDA graphs;
* numerics: sums have the CPU's order, fp32 is fp32 (no TF32), matrix products in bf16 round as the CPU's do;
* fragmentation, rounding to blocks and caching of memory, and what a CUDA context takes;
* NCCL's own failures, timeouts and buffers, and several processes that share the memory of a GPU.

Modules: `build` compiles the extension, `hook` loads it before torch (in each process whose PYTHONPATH has `startup/`;
the stubs of a real tritonserver ignore PYTHONPATH), `device` is `torch.cuda` and what a test sets, `streams` its
streams and events, `trace` counts, `threads` records the current GPU of threads, `plugin` makes `cuda` the default.
"""
