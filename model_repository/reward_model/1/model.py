from python_backend.reward import TritonPythonModel  # noqa: F401
