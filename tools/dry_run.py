"""The option `--dry-run` of `rlhf-triton run` and `rlhf-triton serve`."""

from rlhf_triton.config.command_line import report
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.without_effect import effect_line
from rlhf_triton.errors import RlhfError
from rlhf_triton.tools.checks import preflight
from rlhf_triton.tools.checks.findings import Level, found_by


def print_memory(config: RunConfig, *, served_only: bool = False) -> int:
    """Print the table of `memory_table`, and the settings without effect.

    Return 1 if a file is unusable, or if a device has less free memory than its models need.
    """
    from rlhf_triton.tools.memory_table import memory_lines  # torch: slow to import

    command = "serve --dry-run" if served_only else "run --dry-run"
    memory = preflight.findings(config, command, found_by)
    refused = [finding.text for finding in memory if finding.level is Level.FAILED]
    lines, problems = memory_lines(config, served_only=served_only)
    problems = [*refused, *problems]
    if line := effect_line(config):
        lines.append(line)
    print("\n".join(lines))
    return report(RlhfError("\n".join(problems)), 1) if problems else 0
