"""`rlhf-triton serve` as a process on a repository of tiny models, which is there already and has no checkpoints."""

import subprocess
import sys

import serve_rendered


def write_run(folder):
    """Write the configuration of a run whose critic has a version; the repository is for the test to write."""
    (folder / "weights" / "critic").mkdir(parents=True)
    (folder / "weights" / "critic" / "CURRENT").write_text("0\n")
    ports = "http_port: 0, grpc_port: 0, metrics_port: 0"
    (folder / "run.yaml").write_text(f"server: {{{ports}}}")
    return folder


def serve(run_dir, *overrides):
    """Start `rlhf-triton serve` on the run in `run_dir`."""
    command = [sys.executable, serve_rendered.__file__, serve_rendered.UNCHECKED]
    return subprocess.Popen(
        [*command, "--config", str(run_dir / "run.yaml"), f"run.dir={run_dir}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
