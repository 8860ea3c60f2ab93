"""Entry point of `python -m tools <command>`; imports only the chosen command's module, so that `--help` is instant."""

from __future__ import annotations

import difflib
import importlib.util
import sys

COMMANDS = {
    "run": ("tools.run", "do a whole run: server, critic sidecar (if the algorithm has a critic), actor, report"),
    "serve": ("tools.serve", "run the server only, until Ctrl-C"),
    "render": ("tools.render_configs", "render the model repository from the YAML; --check only compares"),
    "import": ("tools.import_checkpoint", "inspect reward and critic checkpoints, and write their YAML sections"),
    "weights": ("tools.weights", "manage the weights versions of critic and reward model: list, publish, rollback …"),
    "gateway": ("tools.gateway.command", "serve rewards to OpenRLHF, slime, TRL, verl and clients of vLLM over HTTP"),
    "status": ("tools.status", "show served versions, journal, last step and last problem of a run; --watch"),
    "doctor": ("tools.doctor.command", "check the machine, a configuration and its server, with remedies"),
    "prepare": ("tools.demo.prepare", "prepare the demo's checkpoints and prompts"),
    "chaos": ("chaos.command", "run the crash test: kill processes at every point, then check every guarantee"),
    "fuzz": ("chaos.fuzz.command", "run the fuzz test: bad requests to every model while a client scores valid rows"),
    "bench": ("benchmarks.command", "run the measurements behind the README's numbers"),
}


def main(argv: list[str]) -> int:
    """Run the command in `argv[0]` and return its exit code; 2 if there is no such command."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m tools <command> [--help]\n\ncommands:")
        print("\n".join(f"  {command:<9}{what}" for command, (_, what) in COMMANDS.items()))
        return 0 if argv else 2
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    module = COMMANDS[name][0]
    # Neither the wheel nor the image contains the packages `chaos` and `benchmarks`.
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        print(f"error: {name} needs a checkout of the project; run it from the root of the checkout", file=sys.stderr)
        return 2
    sys.argv = [f"python -m tools {name}", *argv[1:]]  # the command's `main` parses sys.argv
    return int(importlib.import_module(module).main() or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
