"""A model in training, for policy and critic alike: optimizer, schedule, ranks, and sharded weights and files."""
