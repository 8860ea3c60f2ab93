"""`python -m tools bench <what>`: the measurements that the README's numbers come from.
Given: a measurement and its arguments. Returns: the measurement's exit code.
"""

from __future__ import annotations

import importlib
import sys

MEASUREMENTS = {
    "scoring": ("tools.bench.scoring", "throughput and latency beside what users have today"),
    "reload": ("tools.bench.reload", "what reloads and updates of the critic cost those who are being served"),
    "learning": ("tools.bench.learning", "every algorithm on a task whose optimum is known"),
    "generation": ("tools.bench.generation", "writing responses beside what transformers offers"),
    "step": ("tools.bench.step", "a PPO step by phase, overlapped beside serial"),
    "trl": ("tools.bench.trl", "training steps without a critic beside TRL's"),
    "update": ("tools.bench.update", "throughput of the critic's update beside the same update padded"),
}


def main() -> int:
    """Run the measurement in `sys.argv[1]`; 2 if there is no such one."""
    arguments = sys.argv[1:]
    name = arguments[0] if arguments else "--help"
    if name in MEASUREMENTS:
        sys.argv = [f"python -m tools bench {name}", *arguments[1:]]
        return int(importlib.import_module(MEASUREMENTS[name][0]).main() or 0)
    if name in ("-h", "--help"):
        print("usage: python -m tools bench <what> --out DIR [--help]\n\nmeasurements:")
        print("\n".join(f"  {key:<11}{what}" for key, (_, what) in MEASUREMENTS.items()))
        return 0 if arguments else 2
    print(f"error: unknown measurement {name!r}; known: {', '.join(MEASUREMENTS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
