"""Two runs of TRL's RewardTrainer, in TRL's own environment: all weights on texts, and a LoRA adapter on chats.

Arguments: the folder of a causal LM, an output folder. Each run writes `<name>/final`, as TRL saves it, and
`<name>.json`: its evaluation accuracy, and the pairs with the scores of TRL's own model.
"""

import json
import sys
from pathlib import Path

EVALUATED = 16  # a whole number of batches: TRL averages over batches


def rows(kind):
    """Return preference pairs; mostly the response with a lovely adjective is preferred, which training can learn."""
    subjects = ("weather", "parser", "file", "morning", "word", "friend", "door", "list")
    texts = [
        (f"The {subject} is", " lovely" + " and good" * (i % 3), " bad" + " and late" * (i % 2))
        for subject in subjects
        for i in range(5)
    ]
    texts = [(prompt, b, a) if i % 5 == 4 else (prompt, a, b) for i, (prompt, a, b) in enumerate(texts)]
    if kind == "text":
        return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in texts]

    def chat(role, content):
        return [{"role": role, "content": content}]

    return [
        {"prompt": chat("user", prompt), "chosen": chat("assistant", a), "rejected": chat("assistant", b)}
        for prompt, a, b in texts
    ]


def train(base, out, name, kind, *, lora):
    """Train one reward model."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import RewardConfig, RewardTrainer

    data = rows(kind)
    arguments = RewardConfig(
        output_dir=str(out / name),
        max_steps=6,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        max_length=64,
    )
    trainer = RewardTrainer(
        model=base,
        args=arguments,
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:EVALUATED]),
        peft_config=LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear") if lora else None,
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model(str(out / name / "final"))
    model = trainer.model.eval()
    scores = []
    with torch.no_grad():
        for row in trainer.eval_dataset:
            ids = (torch.tensor([row[side]]) for side in ("chosen_ids", "rejected_ids"))
            scores.append([float(model(input_ids=one, attention_mask=torch.ones_like(one)).logits) for one in ids])
    (out / f"{name}.json").write_text(json.dumps({"accuracy": accuracy, "pairs": data[:EVALUATED], "scores": scores}))


def main():
    """Train both."""
    import torch

    torch.set_num_threads(1)
    base = sys.argv[1]
    out = Path(sys.argv[2])
    train(base, out, "whole", "text", lora=False)
    train(base, out, "adapter", "chat", lora=True)


if __name__ == "__main__":
    main()
