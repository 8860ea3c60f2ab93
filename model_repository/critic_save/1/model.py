from python_backend.critic_save import TritonPythonModel  # noqa: F401
