"""`rlhf-triton serve` as a process on a repository of tiny models, which is there already."""

import subprocess
import sys
import time

# Rendering has its own tests, and needs checkpoints.
SERVE = """
import sys, rlhf_triton.tools.checks.preflight, rlhf_triton.tools.render_configs, rlhf_triton.tools.serve
rlhf_triton.tools.render_configs.render_repository = lambda config, out: []
rlhf_triton.tools.checks.preflight.check = lambda config, command: []
sys.exit(rlhf_triton.tools.serve.main(sys.argv[1:]))
"""


def write_run(folder):
    """Write the configuration of a run whose critic has a version; the repository is for the test to write."""
    (folder / "weights" / "critic").mkdir(parents=True)
    (folder / "weights" / "critic" / "CURRENT").write_text("0\n")
    ports = "http_port: 0, grpc_port: 0, metrics_port: 0"
    (folder / "run.yaml").write_text(f"server: {{{ports}}}")
    return folder


def serve(run_dir, *overrides):
    """Start `rlhf-triton serve` on the run in `run_dir`."""
    command = [sys.executable, "-c", SERVE, "--config", str(run_dir / "run.yaml"), f"run.dir={run_dir}"]
    return subprocess.Popen(
        [*command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def wait_for(path, process):
    """Return when the file exists; fail if the process ends first."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
