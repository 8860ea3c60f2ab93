"""Five steps of TRL's GRPOTrainer, in TRL's own environment, on rows that the gateway has exported.

Arguments: the policy's folder, an output folder with `rows.jsonl`, and docs/gateway.md, whose code it executes.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Train."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    policy, out, page = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]).read_text()
    code = next(block for block in page.split("```py\n")[1:] if "def exported" in block).partition("```")[0]
    given: dict[str, Any] = {"json": json}
    exec(code.replace("runs/agents/rows.jsonl", str(out / "rows.jsonl")), given)
    torch.set_num_threads(1)
    arguments = GRPOConfig(
        output_dir=str(out / "trl"),
        max_steps=5,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        num_generations=2,
        learning_rate=1e-3,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, local_files_only=True),
        reward_funcs=given["as_given"],
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(policy, local_files_only=True),
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(10)]),
        rollout_func=given["exported"],
    )
    trainer.train()
    (out / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
