"""Serving throughput: the project's server beside what users have today."""
