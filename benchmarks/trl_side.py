"""TRL's side of the benchmark `trl`, run in TRL's environment by `python -m benchmarks.trl_side SETTINGS`; the reward.

Each step appends a line to the file `steps` of the settings (`trl.prepare`). One optimizer step per rollout: no
activation checkpointing, float32, whole responses; a KL term only with PPO.
"""

import json
import sys
from pathlib import Path
from typing import Any


def variety(sample: Any) -> float:
    """Return the share of distinct characters in a sample's first 64: the reward of both sides."""
    return share_of_distinct(sample.response or "")


def share_of_distinct(text: str) -> float:
    """Return the share of distinct characters in the first 64 characters; 0 for an empty text."""
    return len(set(text[:64])) / len(text[:64]) if text else 0.0


def main() -> None:
    """Train until the driver ends the process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["checkpoint"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["checkpoint"])

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            with Path(settings["steps"]).open("a") as file:
                file.write("\n")

    texts = [json.loads(line)["text"] for line in Path(settings["prompts"]).read_text().splitlines()]
    make_trainer = ppo_trainer if settings["algorithm"] == "ppo" else grpo_trainer
    make_trainer(settings, model, tokenizer, texts, Steps()).train()


def ppo_trainer(settings: dict[str, Any], model: Any, tokenizer: Any, texts: list[str], steps: Any) -> Any:
    """Return TRL's PPO trainer; all arguments that are not named keep its defaults."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl.experimental import ppo

    tokenizer.padding_side = "left"
    reward_model, value_model = (
        AutoModelForSequenceClassification.from_pretrained(settings["scoring"], num_labels=1, dtype=torch.float32)
        for _ in range(2)
    )
    arguments = ppo.PPOConfig(
        **common_arguments(settings),
        total_episodes=1_000_000 * settings["rows"],
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=settings["new_tokens"],
        kl_coef=settings["kl_coef"],
    )
    return ppo.PPOTrainer(
        args=arguments,
        processing_class=tokenizer,
        model=model,
        ref_model=None,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in texts]),
        callbacks=[steps],
    )


def grpo_trainer(settings: dict[str, Any], model: Any, tokenizer: Any, texts: list[str], steps: Any) -> Any:
    """Return TRL's GRPO trainer; all arguments that are not named keep its defaults."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [share_of_distinct(text) for text in completions]

    arguments = GRPOConfig(
        **common_arguments(settings),
        loss_type="grpo",
        max_steps=1_000_000,
        num_iterations=1,
        num_generations=settings["group"],
        max_completion_length=settings["new_tokens"],
        beta=settings["kl_coef"],
        top_k=0,
        top_p=1.0,
        generation_kwargs={"min_new_tokens": settings["new_tokens"]},
        shuffle_dataset=False,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts] * 1000),
        callbacks=[steps],
    )


def common_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that both configurations have."""
    micro_batch = min(settings["rows"], settings["trl_micro_batch"])
    return {
        "output_dir": settings["folder"],
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": settings["rows"] // micro_batch,
        "gradient_checkpointing": False,
        "temperature": 1.0,
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


if __name__ == "__main__":
    main()
