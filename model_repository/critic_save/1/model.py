from python_backend.process import long_lived_imports

with long_lived_imports():
    from python_backend.serving.critic_save import TritonPythonModel  # noqa: F401
