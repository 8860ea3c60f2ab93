from python_backend.critic import TritonPythonModel  # noqa: F401
