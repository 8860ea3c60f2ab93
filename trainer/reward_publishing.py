"""Publishes new versions of a live reward model if they fit the served one and pass the gate."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.checkpoints.tokenization import rendering_fingerprint
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.live_models import live_model
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.digests import digest_of_mapped
from rlhf_triton.errors import RlhfError
from rlhf_triton.models.canary import canary_outputs
from rlhf_triton.store.weights import WeightsError, WeightsStore
from rlhf_triton.trainer.accuracy_gate import read_pairs
from rlhf_triton.trainer.publish import Publication, Published, Publisher, copy_checkpoint, reward_loader
from rlhf_triton.trainer.verification import verify_copy

TOLERANCE = 0.01  # how far a new version's accuracy on the gate may be below the served version's


def publish_reward(
    config: RunConfig, checkpoint: Path, *, on_wait: Callable[[str], None], say: Callable[[str], None] = print
) -> Published:
    """Serve the weights in a checkpoint as a new version, if they pass all checks.

    Args:
        on_wait: called repeatedly while waiting, with a description of the state.
        say: called with a text about the accuracies on the gate.

    Raises:
        CheckpointError: the checkpoint is damaged, not finite, or has another architecture, head or tokenizer.
        WeightsError: the served version is damaged.
        RlhfError: its accuracy is more than `TOLERANCE` below the served version's.
        VersionRejected: its copy failed verification, or an instance rejected it; the old version keeps serving.
    """
    section = config.reward
    model = live_model(config, "reward")
    store = WeightsStore(model.store)
    current = store.current()
    if current is None:
        raise WeightsError(f"the weights store {store.root} is empty; `rlhf-triton serve` creates version 0")
    theirs, ours = (rendering_fingerprint(load_tokenizer(path.absolute())) for path in (checkpoint, section.model))
    if theirs != ours:
        raise CheckpointError(
            f"{checkpoint} has another tokenizer or chat template than reward.model ({section.model}), with which "
            "requests are rendered; to serve it, start a run with this checkpoint"
        )
    manifest = store.verify_files(current, digest_of_mapped)
    served = reward_loader(section)(store.folder(current))
    candidate = served.with_weights(checkpoint)
    candidate.check_finite()
    if not np.isfinite(canary_outputs(candidate)).all():
        raise CheckpointError(f"{checkpoint}: the rewards of the canary row are not finite")
    if section.gate is not None:
        pairs = read_pairs(section, served)
        before = pairs.accuracy(served)
        after = pairs.accuracy(candidate)
        say(f"accuracy on {len(pairs.chosen)} pairs: {after:.4f}, served version {current}: {before:.4f}")
        if not after >= before - TOLERANCE:
            raise RlhfError(
                f"not published: its accuracy on reward.gate, {after:.4f}, is more than {TOLERANCE:g} below the served "
                f"version's, {before:.4f}"
            )
    publisher = Publisher(config, store, run_id=manifest.run_id, epoch=manifest.epoch, model=model)
    publication = Publication(
        write=functools.partial(copy_checkpoint, checkpoint),
        verify=functools.partial(verify_copy, model=candidate),
        parent=current,
        source=checkpoint,
    )
    return publisher.publish(publication, on_wait)
