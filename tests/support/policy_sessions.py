"""What an actor does with its policy on any number of ranks: rollouts, updates and checkpoints."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from policy_training import load_checkpoint, random_batch, states
from settings import actor_section

from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import padded, rows_of
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.policy.update import PolicyUpdate
from rlhf_triton.actor.run.checkpoints import save_checkpoint
from rlhf_triton.actor.run.policies import follow_rank_0, make_policy
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RankFailed
from rlhf_triton.models import adapters
from rlhf_triton.training_engine.ranks import ALONE, Ranks

PROMPTS = [Prompt(str(i), "", np.asarray([5, 6, 7, 8][: 2 + i % 3])) for i in range(7)]
LENGTHS = [9, 4, 12, 7, 5, 10, 6]
PROMPT = 3
SPOILED = 99  # seed of a rollout that fails on rank 1
GROUPS = {"algorithm_name": "grpo", "responses_per_prompt": 7, "rollout_size": 7}
CASES = {
    "ppo": {"kl_reference": "actor"},
    "grpo": {**GROUPS, "kl_penalty_in": "loss", "entropy_bonus": 0.01},
    "lora": {"lora_rank": 2, "gradient_checkpointing": True},
    "tied": {"minibatch_size": 2},
    "bfloat16": {"precision": "bfloat16", "gradient_checkpointing": True},
    "frozen": {"policy_freeze": ["embed_tokens", r"layers\.1\.self_attn"]},
    "one micro-batch": {"token_budget": 1000, **GROUPS},
}


def settings_of(folder, case, **others):
    """The actor's section of a case."""
    name = "tied" if case == "tied" else "untied"
    given = {
        "model": folder / name,
        "lr": 1e-2,
        "warmup_steps": 9,
        "minibatch_size": 4,
        "token_budget": 24,
        "max_new_tokens": 6,
        "prompts_max_tokens": 8,
        "rollout_size": 7,
    }
    return actor_section(**{**given, **CASES[case], **others})


def make(section, ranks=ALONE):
    """Return the policy and its update, with non-zero adapters."""
    torch.manual_seed(0)
    policy = Policy(section, ranks)
    return policy, PolicyUpdate(section, policy, Method.from_settings(section.algorithm, section.kl))


def batch_of(seed):
    """Random rows with random advantages, and log-probs near those of a new policy."""
    batch = random_batch(LENGTHS, prompt=PROMPT, seed=seed)
    near = {name: 0.1 * (getattr(batch, name) + 2) - 5 for name in ("logprobs", "ref_logprobs")}
    return replace(batch, **near)


def begin(ranks, config):
    """Return the policy and its update on rank 0; other ranks follow rank 0 to its end, and return nothing."""
    if isinstance(ranks, Ranks) and ranks.rank:
        follow_rank_0(config, ranks)
        return None, None
    return make_policy(config, Method.from_settings(config.actor.algorithm, config.actor.kl), ranks)


def session(ranks, folder, case, **others):
    """Run an actor's calls on its policy: rollouts, updates, a checkpoint and the final policy in `folder/written`."""
    config = RunConfig(actor=settings_of(folder, case, **others))
    if isinstance(ranks, Ranks) and ranks.rank:
        spoil_the_last_generator(ranks)
        adapters.write_tensors = None  # only rank 0 writes a file
    policy, update = begin(ranks, config)
    if policy is None:
        return None
    root = folder / f"written by {policy.ranks.size}, {case}"
    ended = []
    found = {}
    for step in (1, 2):
        policy.renew_generator()
        ended.append(0)
        rows = rows_of(policy.generate(PROMPTS, seed=step, finished=lambda *_: ended.append(ended.pop() + 1)))
        logprobs = policy.sampled_logprobs(rows), policy.logprobs(rows), policy.logprobs(rows, reference=True)
        found[f"rows of step {step}"] = [row.tokens.tolist() for row in rows]
        found[f"logprobs of step {step}"] = [padded(each).numpy() for each in logprobs]
        save_checkpoint(root, states(policy), step, {}, keep=5)
        found[f"weights of step {step}"] = weights_of(policy)
        update.run(batch_of(step), seed=step, kl_coef=0.1)
    policy.save(root / "policy")
    policy.renew_generator()
    found["weights at the end"] = weights_of(policy)
    found["ended"] = ended
    load_checkpoint(root, 2, states(policy))  # on all ranks, at the place in the schedule
    update.run(batch_of(2), seed=2, kl_coef=0.1)
    policy.renew_generator()
    found["weights at the end, resumed"] = weights_of(policy)
    if isinstance(ranks, Ranks):
        with pytest.raises(RankFailed) as failure:
            policy.generate(PROMPTS, seed=SPOILED)
        found["failure"] = str(failure.value)
    return found


def spoil_the_last_generator(ranks):
    """Give rank 1's generator non-finite weights when it generates with the seed SPOILED."""
    follow_sampling = Policy.follow_sampling

    def spoiled(policy):
        run_rows = policy.generation.run_rows

        def run(*args, seed, greedy):
            if seed == SPOILED and ranks.rank == 1:
                for parameter in policy.generator.parameters():
                    parameter.data.fill_(torch.nan)
            run_rows(*args, seed=seed, greedy=greedy)

        policy.generation.run_rows = run
        follow_sampling(policy)

    Policy.follow_sampling = spoiled


def weights_of(policy):
    return [p.detach().clone().float().cpu().numpy() for p in policy.generator.parameters()]
