from python_backend.critic_train import TritonPythonModel  # noqa: F401
