"""What several benchmarks use: the protocol, child processes, servers, workload and statistics."""
