"""Prints how to start a plain tritonserver on a rendered repository: lines for any POSIX shell, in any folder."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from python_backend.config import RunConfig
from python_backend.config.live_models import live_models
from python_backend.path_alias import odd_part
from python_backend.store.control_key import FILE, VARIABLE, key_in
from tools.server.model_loading import compile_ahead
from tools.server.ports import with_free_ports
from tools.server.triton_home import PYTHON_DIR, SETTINGS, find_tritonserver, lay_out_backends
from tools.server.tritonserver import server_command

_SHELL, _KEY = "/proc/@@/", "@@key"  # need no quotes; become `/proc/$$/` and `"$key"`


def shell_command(config: RunConfig, repository: Path, trainer_arguments: Sequence[str] = ()) -> str:
    """Return lines that serve `repository`, whose backend folder and control key are made now.

    They contain no secret: the shell reads the control key. A critic or reward model without a version gets version 0
    first, from the trainer, with `trainer_arguments`.

    Raises:
        ServerStartError: there is no tritonserver for this Python.
    """
    home = find_tritonserver(config.server.tritonserver)
    backends = lay_out_backends(home, config.server_dir / "backends")
    key_file = (config.run.weights_dir.parent / FILE).absolute()
    key_in(key_file)
    compile_ahead(repository)
    descriptors: dict[Path, int] = {}

    def alias(path: Path) -> Path:
        """As `plain_alias`, with a file that the shell opens before it becomes the server."""
        if (odd := odd_part(path)) is None:
            return path
        return Path(f"{_SHELL}fd/{descriptors.setdefault(odd, 9 - len(descriptors))}", path.relative_to(odd))

    python_dir, models, backend = map(alias, (PYTHON_DIR, repository.absolute(), backends))
    command = server_command(home, models, backend, with_free_ports(config.server), _KEY, config.run.trace_endpoint)
    has_versions = all((model.store / "CURRENT").exists() for model in live_models(config))
    return "\n".join(
        [
            "sh -e <<'END'",
            f"cd {_quoted(Path.cwd())}",
            "umask 077",
            *(f"exec {number}<{_quoted(odd)}" for odd, number in descriptors.items()),
            f'export PATH={_quoted(python_dir)}:"$PATH"',
            *([] if has_versions else [f"python3 -m trainer {shlex.join(trainer_arguments)} --init-only </dev/null"]),
            f"export LD_LIBRARY_PATH={':'.join(map(_quoted, home.library_path))}"
            + '"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
            f"export {' '.join(f'{name}={value}' for name, value in SETTINGS.items())}",
            f'key="${{{VARIABLE}:-$(cat {_quoted(key_file)})}}"',
            "exec " + " \\\n  ".join(map(_quoted, command)).replace(f"={_KEY}", '="$key"'),
            "END",
        ]
    )


def _quoted(text: Path | str) -> str:
    return shlex.quote(str(text)).replace(_SHELL, "/proc/$$/")
