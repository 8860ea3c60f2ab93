"""Throughput and latency of the project's server, compared with the servers that users have today."""
