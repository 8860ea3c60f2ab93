"""One training step of a policy, and its checkpoint, for tests of saving and resuming."""

import torch
from prompts import one_prompt
from samples import a_sample, tokens_of
from settings import actor_section

from rlhf_triton.actor.algorithms.kl import KLControl
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.policy.update import PolicyUpdate
from rlhf_triton.actor.run.checkpoints import RunState, check_checkpoint_of
from rlhf_triton.config.actor import RewardsSection


def trainable_policy(**settings):
    """Load a policy with these settings of the actor, named as in `settings`; it keeps them as `actor`."""
    actor = actor_section(**settings)
    policy = Policy(actor)
    policy.actor = actor
    return policy


def update_of(policy):
    """Return the update of this policy, by the algorithm of its section."""
    method = Method.from_settings(policy.actor.algorithm, policy.actor.kl)
    return PolicyUpdate(policy.actor, policy, method)


def train(policy, rows):
    """Take one optimizer step that makes the tokens of samples more likely."""
    tokens, lengths = tokens_of(rows), torch.tensor([len(row.tokens) for row in rows])
    logprobs = policy.token_logprobs.compute(policy.model, tokens, lengths, torch.ones_like(tokens[:, 1:]))
    (-logprobs.clamp(min=-50).mean()).backward()
    policy.trained.step()


def states(policy):
    """Return the state of a run that trains `policy`."""
    kl = KLControl(0.1, target=None)
    return RunState(policy, RewardShaper(RewardsSection(), max_new_tokens=8), kl, one_prompt())


def load_checkpoint(root, step, run):
    """Resume from a checkpoint as the actor does; return the saved state."""
    state = check_checkpoint_of(run.policy, root / str(step))
    run.restore(root / str(step), state)
    return state


def weights_of(policy):
    """The weights that are trained, as one vector on the CPU."""
    return torch.cat([p.detach().cpu().flatten() for p in policy.model.parameters() if p.requires_grad])


def random_batch(lengths, *, prompt, seed, shared=False):
    """Return rows of `prompt` tokens each, the same in all rows if `shared`, and responses; all values are random."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    tokens = torch.randint(5, 30, (len(lengths), width), generator=generator)
    if shared:
        tokens[:, :prompt] = tokens[0, :prompt]
    positions = torch.arange(width - 1)
    ends = torch.tensor(lengths)
    mask = ((positions >= prompt - 1) & (positions < ends[:, None] - 1)).float()
    logprobs, ref, advantages = torch.randn(3, len(lengths), width - 1, generator=generator) * mask
    zeros = torch.zeros_like(mask)
    return PPOBatch(
        tokens=tokens,
        lengths=ends,
        mask=mask,
        policy_weights=mask,
        logprobs=logprobs - 2,
        ref_logprobs=ref - 2,
        advantages=advantages,
        returns=zeros,
        prev_values=zeros,
        kl=zeros,
        groups=torch.arange(len(lengths)),
        versions=torch.full((len(lengths),), -1),
        positive=torch.ones(len(lengths), dtype=torch.bool),
        conversations=torch.arange(len(lengths)),
    )


def samples_of(batch, *, prompt):
    """Return the rows of a batch as responses to their first tokens."""
    return [
        a_sample(tokens[:length].tolist(), prompt)
        for tokens, length in zip(batch.tokens, batch.lengths.tolist(), strict=True)
    ]
