"""Services and runs from Python: `rlhf_triton.serve`, `rlhf_triton.train` and `rlhf_triton.Run`.

They write the YAML that the commands read, start the commands in processes of their own, and read what those write.
"""
