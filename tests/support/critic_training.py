"""Critic updates on small random payloads, and the checkpoints of their state."""

import numpy as np
import torch
from loaders import load_trained
from settings import trainer_section
from tiny_checkpoints import VOCAB

from rlhf_triton.trainer.checkpoint import CheckpointState
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.wire.contract import Limits
from rlhf_triton.wire.training_payload import TrainPayload, train_payload

SETTINGS = {
    "lr": 1e-2,
    "min_lr": 1e-3,
    "warmup_steps": 0,
    "max_steps": 1000,
    "precision": "float32",
}


def settings(**changes):
    return trainer_section(**{**SETTINGS, **changes})


def arrays(num_rows=12, seed=0):
    """Return a padded payload; the target of a token is 1 if it is even, else 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 20, (num_rows, 1))
    width = int(lengths.max())
    tokens = np.where(np.arange(width)[None] < lengths, rng.integers(1, VOCAB, (num_rows, width)), 0)
    mask = ((np.arange(width - 1)[None] < lengths - 1) & (rng.random((num_rows, width - 1)) < 0.8)).astype(np.float32)
    returns = (tokens[:, :-1] % 2 == 0).astype(np.float32)
    prev_values = rng.normal(size=returns.shape).astype(np.float32)
    return {
        "tokens": tokens,
        "sequence_lengths": lengths,
        "returns": returns,
        "prev_values": prev_values,
        "mask": mask,
    }


def payload(num_rows=12, seed=0):
    return train_payload(arrays(num_rows, seed), Limits(VOCAB))


def silent(_):
    pass


def trained(checkpoint, payloads, **changes):
    update = CriticUpdate(load_trained(checkpoint), settings(**changes))
    return update, [update.train(each, silent) for each in payloads]


def weights(update):
    return torch.cat([p.detach().double().flatten() for p in update.trained.parameters.values()])


def state(step, update):
    """Return the state of an update after `step`, as the sidecar would save it."""
    return CheckpointState(
        run_id="run",
        step=step,
        optimizer_step=update.trained.optimizer_step,
        version=step,
        epoch=1,
        requested=False,
        settings=update.trained.settings,
        base_digest="a hash",
        results=[{"entry": "x"}],
    )


def small_payload():
    """Return four rows with random returns, all of whose tokens count."""
    rng = np.random.default_rng(0)
    lengths = np.array([5, 9, 3, 12])
    count = lengths.sum() - len(lengths)
    returns, prev_values = rng.normal(size=(2, count)).astype(np.float32)
    return TrainPayload(rng.integers(1, VOCAB, lengths.sum()), lengths, returns, prev_values, np.ones_like(returns))
