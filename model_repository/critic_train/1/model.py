import sys

sys.path[:] = filter(None, sys.path)  # without the working directory, which Triton puts first

from rlhf_triton.process import long_lived_imports  # noqa: E402

with long_lived_imports():
    from rlhf_triton.python_backend.serving.critic_train import TritonPythonModel  # noqa: F401
