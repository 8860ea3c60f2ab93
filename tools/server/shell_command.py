"""Prints how to start a plain tritonserver on a rendered repository: lines for any POSIX shell, in any folder."""

from __future__ import annotations

import shlex
from pathlib import Path

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.path_alias import special_prefix
from rlhf_triton.store.control_key import KEY_FILE, VARIABLE, key_in
from rlhf_triton.tools.server.model_loading import compile_ahead
from rlhf_triton.tools.server.ports import with_free_ports
from rlhf_triton.tools.server.triton_home import (
    PYTHON_DIR,
    SETTINGS,
    ServerStartError,
    find_tritonserver,
    lay_out_backends,
)
from rlhf_triton.tools.server.tritonserver import server_command

PLAIN_EXIT_TIMEOUT_S = 10  # without a supervisor; models need seconds to unload, else it ends with code 1

_KEY = "@@key"  # needs no quotes; becomes `"$key"`


def shell_command(config: RunConfig, repository: Path) -> str:
    """Return lines that serve `repository`, whose backend folder and control key are made now.

    They contain no secret: the shell reads the control key.

    Raises:
        ServerStartError: there is no tritonserver for this Python, `server.host` has no address, or a path is one that
            the Python backend does not take.
    """
    home = find_tritonserver(config.server.tritonserver)
    backends = lay_out_backends(home, config.server_dir / "backends")
    key_file = (config.run.weights_dir.parent / KEY_FILE).absolute()
    key_in(key_file)
    compile_ahead(repository)
    places = (PYTHON_DIR, repository.absolute(), backends)
    if odd := next(filter(None, map(special_prefix, places)), None):
        raise ServerStartError(f"{odd}: Triton's python backend needs a path of letters, digits and _.-; move it")
    section = with_free_ports(config.server)
    endpoint = config.run.trace_endpoint
    command = server_command(home, repository.absolute(), backends, section, _KEY, endpoint, PLAIN_EXIT_TIMEOUT_S)
    return "\n".join(
        [
            "sh -e <<'END'",
            f"cd {_quoted(Path.cwd())}",
            "umask 077",
            f'export PATH={_quoted(PYTHON_DIR)}:"$PATH"',
            f"export LD_LIBRARY_PATH={':'.join(map(_quoted, home.library_path))}"
            + '"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"',
            f"export {' '.join(f'{name}={value}' for name, value in SETTINGS.items())}",
            f'key="${{{VARIABLE}:-$(cat {_quoted(key_file)})}}"',
            "exec " + " \\\n  ".join(map(_quoted, command)).replace(f"={_KEY}", '="$key"'),
            "END",
        ]
    )


def _quoted(text: Path | str) -> str:
    return shlex.quote(str(text))
