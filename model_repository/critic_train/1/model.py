from python_backend.serving.critic_train import TritonPythonModel  # noqa: F401
