"""Five steps of TRL's GRPOTrainer, in TRL's own environment, on rows that the gateway has exported.

Arguments: the policy's folder, an output folder with `rows.jsonl`, and docs/gateway.md, whose code it executes.
"""

import json
import sys
from pathlib import Path

from trl_run import train


def main():
    """Train."""
    policy = sys.argv[1]
    out = Path(sys.argv[2])
    page = Path(sys.argv[3]).read_text()
    code = next(block for block in page.split("```py\n")[1:] if "def exported" in block).partition("```")[0]
    given = {"json": json}
    exec(code.replace("runs/agents/rows.jsonl", str(out / "rows.jsonl")), given)
    rows = [{"prompt": str(i)} for i in range(10)]
    settings = {"per_device_train_batch_size": 4, "num_generations": 2, "shuffle_dataset": False}
    train(policy, out, rows, given["as_given"], rollout=given["exported"], max_steps=5, **settings)


if __name__ == "__main__":
    main()
