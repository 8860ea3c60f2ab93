"""Client library for the Triton servers: connections, retries, failover, and the order of training requests."""
