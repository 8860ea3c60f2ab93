from python_backend.serving.critic import TritonPythonModel  # noqa: F401
