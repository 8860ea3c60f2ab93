"""The vLLM server that `rlhf-triton run` starts for `actor.generation.engine: vllm`, and restarts when it dies."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_triton.config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.tools.server.child import Child, restart_pause_s
from rlhf_triton.tools.server.health import get_page
from rlhf_triton.tools.server.ports import free_port

HOST = "127.0.0.1"
STOP_S = 20.0
RANK_LIMITS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
STEADY_S = 60.0  # a server that ran for less time is restarted after a pause
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that load weights; the server is bound to loopback
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": "",  # its packages are in an environment of their own
}


def starts_vllm(config: RunConfig) -> bool:
    """Return whether the run needs a vLLM server that `rlhf-triton run` must start."""
    generation = config.actor.generation
    return generation.engine == "vllm" and not generation.vllm.servers


def check_vllm(config: RunConfig) -> None:
    """Check the settings before the server is started. Raises ConfigError."""
    actor = config.actor
    command = actor.generation.vllm.command
    if shutil.which(command) is None:
        raise ConfigError(
            f"actor.generation.vllm.command: {command} is not an executable; install vLLM in its own environment "
            "(docs/vllm.md) and give the path of its bin/vllm, or name running servers in actor.generation.vllm.servers"
        )
    if actor.policy.lora_rank > RANK_LIMITS[-1]:
        raise ConfigError(
            f"actor.policy.lora_rank: {actor.policy.lora_rank} is above {RANK_LIMITS[-1]}, the most that vLLM serves"
        )


class VllmServer:
    """One `vllm serve` on a free port of loopback. Call `look` regularly, and `stop` at the end."""

    def __init__(self, config: RunConfig, *, log: Callable[[str], None]) -> None:
        self.url = f"{HOST}:{free_port(HOST)}"
        self._arguments = vllm_arguments(config, self.url)
        self._command = str(shutil.which(config.actor.generation.vllm.command))
        devices = config.actor.generation.vllm.cuda_devices
        self._environment = {**ENVIRONMENT, **({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})}
        self._log_path, self._log = config.run.logs_dir / "vllm.log", log
        self._short_lives, self._start_at = 0, 0.0
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.process.pid

    def await_ready(self, while_waiting: Callable[[], None]) -> None:
        """Wait until the server has loaded the model. Raises RlhfError if it ends instead."""
        while get_page(self.url, "/health") != "OK":
            while_waiting()
            if self._child.poll() is not None:
                raise RlhfError(self._child.obituary())

    def look(self) -> None:
        """Restart the server if it has died, at once or after a pause; bound its log."""
        if self._child.poll() is None:
            self._child.bound_log()
            return
        now = time.monotonic()
        if not self._start_at:
            self._short_lives = self._short_lives + 1 if now - self._started < STEADY_S else 0
            self._start_at = now + restart_pause_s(self._short_lives)
            self._log(f"{self._child.obituary()}\nrestarting vLLM")
            self._kill_group()
        elif now >= self._start_at:
            self._log_path.replace(self._log_path.with_suffix(".previous.log"))  # has the reason of the death
            self._start()

    def stop(self) -> None:
        """Stop the server and its processes."""
        self._child.stop(signal.SIGTERM, STOP_S)
        self._kill_group()

    def _start(self) -> None:
        self._started, self._start_at = time.monotonic(), 0.0
        self._child = Child("vLLM server", self._arguments, self._log_path, self._environment, command=[self._command])

    def _kill_group(self) -> None:
        """Kill the server's processes, which survive it if it is killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def vllm_arguments(config: RunConfig, url: str) -> list[str]:
    """Return the arguments of `vllm` that serve the policy of a run at `url`."""
    policy, generation = config.actor.policy, config.actor.generation
    longest, _ = config.longest_row
    host, _, port = url.rpartition(":")
    limit = next(limit for limit in RANK_LIMITS if limit >= policy.lora_rank)
    adapters = ["--enable-lora", "--max-lora-rank", str(limit)] if policy.lora_rank else []
    return [
        "serve",
        str(Path(policy.model).absolute()),
        "--host",
        host,
        "--port",
        port,
        "--dtype",
        policy.precision,
        "--max-model-len",
        str(longest),
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        *adapters,
        *generation.vllm.arguments,
    ]
