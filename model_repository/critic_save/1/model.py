from python_backend.serving.critic_save import TritonPythonModel  # noqa: F401
