from rlhf_triton.process import long_lived_imports

with long_lived_imports():
    from rlhf_triton.python_backend.serving.reward import TritonPythonModel  # noqa: F401
