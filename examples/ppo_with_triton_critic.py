"""PPO over plain transformers, with a critic that Triton serves and trains: for a trainer that has none.

rlhf-triton serve --config critic.yaml   # run: {dir: runs/mine}, critic: {model: path/to/policy}
python -m rlhf_triton.trainer --config critic.yaml       # in another terminal
python examples/ppo_with_triton_critic.py path/to/policy 127.0.0.1:8000 mine
"""

import os
import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_triton import CriticClient
from rlhf_triton.actor.algorithms.advantages import gae, masked_whiten, token_rewards

PROMPTS = ("The weather", "Open the file", "My best friend", "Once upon a time") * 4


def reward(response: str) -> float:
    """The reward of this example: the share of the letter e. A verifier, or a request to a reward model, goes here."""
    return response.count("e") / max(1, len(response))


def logprobs(policy: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of token t+1 at position t, [B, S-1]."""
    return policy(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def train(folder: str, url: str, run_id: str, *, done: int = 0, steps: int = 20) -> list[tuple[float, float, int]]:
    """Train steps done+1 … done+steps; return each step's mean reward, value loss and version of the critic."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    history = []
    with CriticClient(url, run_id=run_id, training_key=os.environ.get("TRAINING_KEY")) as critic:
        critic.rewind(done)  # 0: a new run
        for step in range(done + 1, done + steps + 1):
            # One response to each prompt: rows of token ids without padding.
            prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
            sampled = {"do_sample": True, "max_new_tokens": 16, "pad_token_id": tokenizer.eos_token_id}
            rows = [policy.generate(prompt, **sampled)[0] for prompt in prompts]
            starts, lengths = torch.tensor([p.shape[1] for p in prompts]), torch.tensor([len(row) for row in rows])
            responses = [tokenizer.decode(row[start:]) for row, start in zip(rows, starts, strict=True)]
            rewards = torch.tensor([reward(response) for response in responses])

            # Values from Triton; advantages and returns, [B, S-1]: position t is the choice of token t+1.
            tokens = pad_sequence(rows, batch_first=True)
            positions = torch.arange(tokens.shape[1] - 1)
            mask = ((positions >= starts[:, None] - 1) & (positions < lengths[:, None] - 1)).float()
            values = pad_sequence([torch.tensor(v) for v in critic.values(rows).values], batch_first=True)[:, :-1]
            given = token_rewards(rewards, torch.zeros_like(values), lengths, kl_coef=0.0)
            advantages, returns = gae(values, given, mask, gamma=1.0, lam=0.95)

            # The critic's update: ragged rows again. It returns once the new weights are served.
            targets = ([row[: n - 1] for row, n in zip(x, lengths, strict=True)] for x in (returns, values, mask))
            update = critic.train(step, rows, *targets)

            # The policy's update: PPO's clipped loss.
            advantages, old = masked_whiten(advantages, mask), logprobs(policy, tokens).detach()
            for _ in range(2):
                ratio = (logprobs(policy, tokens) - old).exp()
                gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                optimizer.zero_grad()
                (-(gain * mask).sum() / mask.sum()).backward()
                optimizer.step()
            history.append((float(rewards.mean()), update.loss_mean, update.weights_version))
            print("step {}: reward {:.3f}, value loss {:.4f}, critic version {}".format(step, *history[-1]))
        critic.save(step)  # when you save the policy; resume with done=step
    return history


if __name__ == "__main__":
    train(*sys.argv[1:4])
