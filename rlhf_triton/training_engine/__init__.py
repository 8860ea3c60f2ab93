"""Training of policy and critic models: optimizer, schedule, ranks, and sharded weights and files."""
