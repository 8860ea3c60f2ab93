"""Training one model on several processes (ranks): launching them, their protocol, and sharded weights and files."""
