"""Code that several benchmarks share: the protocol, child processes, servers, workload and statistics."""
