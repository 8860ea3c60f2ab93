"""Entry point of `rlhf-triton <command>`; imports only the chosen command's module.

Exit codes of all commands: 0, done; 1, a check found something; 2, wrong arguments or another error; 130, interrupted.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = {
    "run": "do a whole run: server, critic sidecar (if the algorithm has a critic), actor, report",
    "serve": "run the server only, until Ctrl-C",
    "init": "write the YAML of your models, which it tries and converts, or an environment of agents",
    "example-model": "write a small reward model and a policy to try things with",
    "export": "write a checkpoint of the policy as a Hugging Face folder or as a PEFT adapter",
    "replay": "compute steps of a run again from its samples, and compare each bit",
    "weights": "manage the weights versions of critic and reward model: list, publish, rollback …",
    "gateway": "serve rewards to OpenRLHF, TRL, verl and clients of vLLM over HTTP",
    "status": "show served versions, journal, last step and last problem of a run",
    "report": "write the page of a run, also while it runs",
    "doctor": "check the machine, a configuration and its server, with remedies",
}
# Modules that are not called as their command.
MODULES = {"gateway": "gateway.command", "report": "report.page", "example-model": "example_model"}
ROOT = Path(__file__).resolve().parent.parent
# The extras of pyproject.toml that a command or a package needs; `train` has all others.
EXTRAS = {"gateway": "gateway", "serve": "serve", "example-model": "serve", "gguf": "demo"}
COMPUTING = ("tokenizers", "torch", "transformers")


def module_of(command: str) -> str:
    """Return the module whose `main` executes the command."""
    return f"rlhf_triton.tools.{MODULES.get(command, command)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names and return its exit code; 2 if there is no such command."""
    program = "rlhf-triton" if Path(sys.argv[0]).name == "__main__.py" else Path(sys.argv[0]).name
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help"):
        print(f"usage: {program} <command> [--help]\n\ncommands:")
        print("\n".join(f"  {command:<15}{what}" for command, what in COMMANDS.items()))
        return 0 if name else 2
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    if (ROOT / "examples").is_dir():  # in a checkout; it is no part of the installed package
        sys.path.append(str(ROOT))
    sys.argv = [f"{program} {name}", *arguments]  # the command's `main` parses sys.argv
    try:
        return int(importlib.import_module(module_of(name)).main() or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if (ROOT / package).is_dir():  # ours
            raise
        extra = EXTRAS.get(package, EXTRAS.get(name, "train")) + (
            ",serving" if package in COMPUTING and name == "gateway" else ""
        )
        print(f"error: {name} needs the package {package}: pip install '.[{extra}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # commands that have something to say when they are interrupted catch it themselves
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
