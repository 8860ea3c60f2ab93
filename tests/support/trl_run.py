"""A run of TRL's GRPOTrainer, in TRL's own environment, with rewards from the gateway.

Arguments: the policy's folder, an output folder, the number of steps. Writes each prompt, completion and reward to
`rewards.jsonl`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tools.gateway.trainer_rewards import trl_reward


def main() -> None:
    """Train."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    policy, out, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

    def recorded(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        rewards = trl_reward(prompts, completions, **columns)
        with (out / "rewards.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in zip(prompts, completions, rewards, strict=True))
        return rewards

    prompts = [{"prompt": text, "answer": "5"} for text in ("Open the", "A lovely", "The parser", "Bad weather")]
    arguments = GRPOConfig(
        output_dir=str(out / "trl"),
        max_steps=steps,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(policy, local_files_only=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=recorded,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(prompts * 50),
    )
    trainer.train()
    (out / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
