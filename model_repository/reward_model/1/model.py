from python_backend.serving.reward import TritonPythonModel  # noqa: F401
