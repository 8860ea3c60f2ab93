"""The vLLM server that `rlhf-triton run` starts for `actor.generation.engine: vllm`, and restarts when it dies."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.tools.server.child import Child, WaitCheck
from rlhf_triton.tools.server.health import get_page
from rlhf_triton.tools.server.triton_home import ServerStartError

STOP_S = 20.0
RANK_LIMITS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
POLL_INTERVAL_S = 0.1
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
    """One `vllm serve` on loopback; a `Supervisor` owns it."""

    def __init__(self, config: RunConfig, url: str, check: WaitCheck = lambda: None) -> None:
        """Start it at `url` and return once the model is loaded; an exception of `check` ends the start.

        Raises ServerStartError if it ends instead; nothing is left running.
        """
        devices = config.actor.generation.vllm.cuda_devices
        environment = {**ENVIRONMENT, **({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})}
        self.log_path = config.run.logs_dir / "vllm.log"
        command = [str(shutil.which(config.actor.generation.vllm.command))]
        self._child = Child("vLLM server", vllm_arguments(config, url), self.log_path, environment, command=command)
        try:
            while get_page(url, "/health") != "OK":
                check()
                self.raise_if_dead()
                time.sleep(POLL_INTERVAL_S)
        except BaseException:  # also that of `check`
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.process.pid

    def raise_if_dead(self) -> None:
        """Raise ServerStartError, with the last lines of the log, if the process has ended."""
        if self._child.poll() is not None:
            raise ServerStartError(self._child.exit_message())

    def kill(self) -> None:
        """Kill the server and its processes, which survive it if it is killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the server and its processes."""
        self._child.stop(signal.SIGTERM, STOP_S)
        self.kill()


def vllm_arguments(config: RunConfig, url: str) -> list[str]:
    """Return the arguments of `vllm` that serve the policy of a run at `url`."""
    policy = config.actor.policy
    generation = config.actor.generation
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
