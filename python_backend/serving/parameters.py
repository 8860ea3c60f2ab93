"""The parameters of a served model, as its config.pbtxt has them. Needs neither torch nor Triton."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_triton.path_alias import plain_alias


@dataclass(frozen=True)
class Parameters:
    """A model's `parameters`. Raises ValueError naming the model and the parameter."""

    model: str
    """The model's name."""
    values: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return a required parameter."""
        if not self.values.get(name):
            raise ValueError(
                f"{self.model}/config.pbtxt has no parameter {name}; render it with tools/render_configs.py"
            )
        return self.values[name]

    def optional(self, name: str) -> str | None:
        """Return a parameter, or None if it is absent or empty."""
        return self.values.get(name) or None

    def number(self, name: str) -> int:
        """Return a required parameter as an integer."""
        return int(self.text(name))

    def path(self, name: str) -> Path:
        """Return a required parameter as an absolute path; relative paths start at tritonserver's working directory.

        Returns an alias for a path that is not ASCII: file names in this process must be ASCII.
        """
        path = Path(self.text(name)).absolute()
        return path if str(path).isascii() else plain_alias(path)
