"""PPO in TRL: its GRPOTrainer generates, computes the loss and steps; a critic that Triton serves gives the advantages.

rlhf-triton serve --config critic.yaml                # run: {dir: runs/mine}, critic: {model: path/to/policy}
python -m rlhf_triton.trainer --config critic.yaml    # in another terminal
python examples/trl_ppo.py path/to/policy 127.0.0.1:8000 mine --output_dir out --learning_rate 1e-5
"""

import sys

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

import rlhf_triton as rt


def share_of_e(completions, **_):  # or, of a served model, rt.RewardClient(url).as_trl()
    return [text.count("e") / max(1, len(text)) for text in completions]


def gae(values, reward):  # gamma 1, lambda 0.95; the response's last token has the reward
    gains = np.append(values[1:], reward) - values
    for t in reversed(range(len(gains) - 1)):
        gains[t] += 0.95 * gains[t + 1]
    return gains


class PPOTrainer(GRPOTrainer):  # in one process
    def _calculate_rewards(self, *arguments):
        self.rewards = super()._calculate_rewards(*arguments)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        ids, kept = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], 1) for name in ("ids", "mask"))
        rows = [row[mask.bool()].cpu().numpy() for row, mask in zip(ids, kept, strict=True)]
        before = (batch["prompt_mask"].sum(1) - 1).tolist()  # position t of a row is the choice of token t+1
        values = [row[first:-1] for row, first in zip(critic.values(rows).values, before, strict=True)]
        gains = [gae(*pair) for pair in zip(values, self.rewards[:, 0].tolist(), strict=True)]  # NaN without a reward
        targets = (map(np.nan_to_num, map(np.add, gains, values)), values, map(np.isfinite, gains))  # returns, …, mask
        whole = ([np.pad(part, (first, 0)) for part, first in zip(parts, before, strict=True)] for parts in targets)
        self.step = getattr(self, "step", 0) + 1
        update = critic.train(self.step, rows, *whole)  # returns once the new weights are served
        self._metrics["train"]["critic/loss"].append(update.loss_mean)
        mean = np.nanmean(np.concatenate(gains))
        std = np.nanstd(np.concatenate(gains)) + 1e-8
        advantages = pad_sequence([torch.as_tensor(np.nan_to_num(gain - mean) / std) for gain in gains], True)
        return {**batch, "advantages": advantages.to(ids.device)}


if __name__ == "__main__":
    policy, url, run_id, *options = sys.argv[1:]
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(options)
    prompts = ("The weather", "Open the file", "My best friend", "Once upon a time") * 100
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    with rt.CriticClient(url, run_id=run_id) as critic:
        critic.rewind(0)
        PPOTrainer(policy, share_of_e, args=config, train_dataset=data).train()
