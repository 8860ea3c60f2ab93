"""Trains the critic before version 0 is published, on steps of earlier runs and on files of responses with returns.

The training set is in memory, 20 bytes per token. On a CPU, equal files and settings give bit-identical results.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.errors import NotFinite
from rlhf_triton.models.batching import plan_micro_batches
from rlhf_triton.models.modeling import CriticModel
from rlhf_triton.models.out_of_memory import OutOfMemory
from rlhf_triton.store.durable import staged_folder
from rlhf_triton.store.jsonl import append_jsonl
from rlhf_triton.trainer.critic_update import TrainingRow, load_update
from rlhf_triton.trainer.training_set import KEY, packed, read_rows, split
from rlhf_triton.training_engine.explained_variance import explained_variance
from rlhf_triton.training_engine.ranks import AnyRanks
from rlhf_triton.training_engine.trained import MAX_ROWS

logger = logging.getLogger(__name__)
EPOCHS = 3  # passes over the training set
LOGGED = 10  # log lines per pass over the training set


def pretrained(critic: CriticModel, config: RunConfig, ranks: AnyRanks, on_wait: Callable[[str], None]) -> CriticModel:
    """Return `critic` after training on `critic.pretrain`; log its explained variance on held-out prompts.

    Args:
        ranks: the processes that train the critic, of which this is rank 0.
        on_wait: called after each micro-batch, with a description of the state.

    Raises:
        ConfigError: the training set cannot be used; the message names the file.
        RlhfError: an update failed.
    """
    start = time.monotonic()
    settings = config.trainer
    training, held_out = split(read_rows(config, critic.limits), config.run.seed)
    size = settings.global_batch_size * max(1, len(training) // (settings.global_batch_size * LOGGED))
    with staged_folder(config.run.weights_dir) as folder:
        critic.write(folder)
        update = load_update(folder, settings, seed=config.run.seed, ranks=ranks, pretraining=True)
        before = explained_by(update.critic, held_out, settings.token_budget)
        loss = 0.0
        logger.info("pretraining on %d rows; %d of other prompts are held out", len(training), len(held_out))
        # From the last rows to the first: the policy of a run's first steps resembles the new run's, so these rows must
        # not be outweighed by a later, better policy's, under which the same prompts have a higher value.
        for epoch, first in itertools.product(range(EPOCHS), reversed(range(0, len(training), size))):
            part = training[first : first + size]
            rows = [part[i] for i in np.random.default_rng([config.run.seed, epoch, first]).permutation(len(part))]
            try:
                report = update.train(packed(rows), lambda _: on_wait("pretraining the critic"))
            except (NotFinite, OutOfMemory) as error:
                raise ConfigError(f"{KEY}: {error}; lower trainer.optimizer.lr or trainer.token_budget") from error
            if not report.is_finite:
                raise ConfigError(f"{KEY}: the critic's weights became non-finite; lower trainer.optimizer.lr")
            loss = report.loss_mean
            done = epoch + 1 - first / len(training)
            logger.info("pretraining: %.1f of %d epochs, loss %.4g", done, EPOCHS, loss)
        after = explained_by(update.critic, held_out, settings.token_budget)
    logger.info("explained variance of the held-out rows: %.4f; before: %.4f", after, before)
    line = {
        "time": time.time(),
        "step": 0,
        "pretrain/rows": len(training),
        "pretrain/held_out_rows": len(held_out),
        "pretrain/optimizer_steps": update.trained.optimizer_step,
        "pretrain/loss": loss,
        "pretrain/explained_variance_before": before,
        "pretrain/explained_variance": after,
        "pretrain/seconds": time.monotonic() - start,
        "weights_version": 0,
    }
    append_jsonl(config.run.dir / "critic_metrics.jsonl", [line])
    return update.critic


def explained_by(critic: CriticModel, rows: Sequence[TrainingRow], token_budget: int) -> float:
    """Return the explained variance of the returns of all response tokens by the critic's values."""
    values = []
    returns = []
    for batch in plan_micro_batches([row.tokens.size for row in rows], token_budget=token_budget, max_rows=MAX_ROWS):
        for row, of_row in zip(batch, critic.values([rows[i].tokens for i in batch]), strict=True):
            is_scored = rows[row].mask > 0
            values.append(of_row[:-1][is_scored])
            returns.append(rows[row].returns[is_scored])
    return explained_variance(np.concatenate(values), np.concatenate(returns))
