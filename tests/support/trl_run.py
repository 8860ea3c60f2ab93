"""A run of TRL's GRPOTrainer, in TRL's own environment, with rewards from Triton.

Arguments: the policy's folder, an output folder, the number of steps, the server's address. Writes each prompt,
completion and reward to `rewards.jsonl`.
"""

import json
import sys
from pathlib import Path

import rlhf_triton as rt


def main():
    """Train."""
    out = Path(sys.argv[2])
    steps = int(sys.argv[3])
    score = rt.RewardClient(sys.argv[4]).as_trl()

    def recorded(prompts, completions, **columns):
        rewards = score(prompts, completions, **columns)
        with (out / "rewards.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in zip(prompts, completions, rewards, strict=True))
        return rewards

    prompts = [{"prompt": text, "answer": "5"} for text in ("Open the", "A lovely", "The parser", "Bad weather")]
    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
    train(sys.argv[1], out, prompts * 50, recorded, max_steps=steps, **settings)


def train(
    policy,
    out,
    rows,
    reward,
    *,
    rollout=None,
    **settings,
):
    """Train with these settings of TRL's GRPOConfig; write what the trainer logs to `log.json`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    arguments = GRPOConfig(
        output_dir=str(out / "trl"),
        use_cpu=True,
        bf16=False,
        learning_rate=1e-3,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        **settings,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, local_files_only=True),
        reward_funcs=reward,
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(policy, local_files_only=True),
        train_dataset=Dataset.from_list([*rows]),
        rollout_func=rollout,
    )
    trainer.train()
    (out / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
