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

_PID, _KEY = "the-shell", "control-key"  # placeholders that need no quotes, for `$$` and `$key`


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
    opened: list[str] = []

    def alias(path: Path) -> Path:
        """As `plain_alias`, for the shell's process, which tritonserver replaces."""
        odd = odd_part(path)
        if odd is None:
            return path
        opened.append(f"exec {9 - len(opened)}<{shlex.quote(str(odd))}\n")
        return Path(f"/proc/{_PID}/fd/{10 - len(opened)}", path.relative_to(odd))

    places = alias(repository.absolute()), alias(backends)
    command = server_command(home, *places, with_free_ports(config.server), _KEY, config.run.trace_endpoint)
    python_dir = shlex.quote(str(alias(PYTHON_DIR)))
    missing = any(not (model.store / "CURRENT").exists() for model in live_models(config))
    first = f"python3 -m trainer {shlex.join(trainer_arguments)} --init-only </dev/null\n" if missing else ""
    options = " \\\n  ".join(map(shlex.quote, command))
    text = (
        f"cd {shlex.quote(str(Path.cwd()))}\n"
        "umask 077\n"
        f"{''.join(opened)}"
        f'export PATH={python_dir}:"$PATH"\n'
        f"{first}"
        f"export LD_LIBRARY_PATH={':'.join(shlex.quote(str(folder)) for folder in home.library_path)}\n"
        f"export {' '.join(f'{name}={value}' for name, value in SETTINGS.items())}\n"
        f'key="${{{VARIABLE}:-$(cat {shlex.quote(str(key_file))})}}"\n'
        f"exec {options}\n"
    )
    return "sh -e <<'END'\n" + text.replace(_PID, "$$").replace(f"={_KEY}", '="$key"') + "END"
