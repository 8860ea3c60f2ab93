"""The checks that a version must pass before CURRENT may name it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.checkpoints.tensor_file import STORED_AS
from rlhf_triton.digests import digest_of_mapped
from rlhf_triton.errors import RankFailed
from rlhf_triton.python_backend.models.canary import SERVED_TOLERANCE, canary_difference, canary_outputs
from rlhf_triton.python_backend.models.modeling import CriticModel, RewardModel, load_critic
from rlhf_triton.store.weights import Manifest, WeightsError, WeightsStore
from rlhf_triton.trainer.trained_critic import TrainedCritic

CANARY_TOLERANCE = 1e-5  # relative to the largest value: equal weights differ by rounding at most
CROSS_DEVICE_TOLERANCE = 1e-3  # if one forward pass runs on a GPU and the other one on the CPU


def verify_version(
    store: WeightsStore, version: int, model: CriticModel | RewardModel, expected: np.ndarray | None = None
) -> None:
    """Verify that `version` holds the weights of `model`.

    Checks the hash, names, shapes and dtypes, that all weights are finite, and that a forward pass through the serving
    code gives the model's values, or its rewards, for the canary row. A critic on several ranks compares its slices
    instead; an instance that stages the version checks its forward pass.

    Args:
        model: the model in memory.
        expected: the model's outputs for the canary row, if known already.

    Raises:
        WeightsError: a check failed; the message names the version and the cause.
    """
    if isinstance(model, TrainedCritic) and model.in_slices:
        try:
            return model.verify_slices(store, version)
        except (CheckpointError, RankFailed) as error:
            raise WeightsError(f"version {version}: {error}") from error
    try:
        # Hashing releases the GIL: run it in parallel to the other checks.
        with ThreadPoolExecutor(1, "hash") as beside:
            whole = beside.submit(store.verify_files, version, digest_of_mapped)
            try:
                staged = model.with_weights(store.folder(version))
                staged.check_finite()
                served = canary_outputs(staged)
            finally:
                manifest = whole.result()  # a damaged file's own error replaces the errors that it caused above
    except CheckpointError as error:
        raise WeightsError(f"version {version}: {error}") from error
    tolerance = CANARY_TOLERANCE if staged.model.device == model.model.device else CROSS_DEVICE_TOLERANCE
    if isinstance(model, CriticModel) and model.stored_as is not None:
        tolerance = SERVED_TOLERANCE[model.stored_as]
    if isinstance(model, TrainedCritic):  # others are copies of a checkpoint, in any dtype
        _check_dtypes(manifest, model)
    difference = canary_difference(served, canary_outputs(model) if expected is None else expected)
    if not difference <= tolerance:
        raise WeightsError(
            f"version {version}: the values for the canary row differ by {difference:.3g} from the published model's"
        )


def verify_alone(
    store: WeightsStore, version: int, load: Callable[[Path], CriticModel | RewardModel] = load_critic
) -> Manifest:
    """Verify a version from its files only, without comparing it with the model in memory that produced it.

    Checks that the files are intact, and that the weights and the outputs for the canary row are finite; returns the
    manifest.

    Args:
        load: loads the model from a version's folder.

    Raises:
        WeightsError: a check failed; the message names the version and the cause.
    """
    try:
        manifest = store.verify_files(version)
        model = load(store.folder(version))
        model.check_finite()
    except CheckpointError as error:
        raise WeightsError(f"version {version}: {error}") from error
    if not np.isfinite(canary_outputs(model)).all():
        raise WeightsError(f"version {version}: the values for the canary row are not finite")
    return manifest


def holds_weights(store: WeightsStore, version: int, critic: CriticModel) -> bool:
    """Return whether `version` has the critic's weights, bit for bit in the dtype that versions have."""
    if isinstance(critic, TrainedCritic) and critic.in_slices:
        return critic.holds_slices(store, version)
    try:
        stored = critic.with_weights(store.folder(version)).model.state_dict()
    except CheckpointError:
        return False
    return all(torch.equal(tensor, stored[name].to(tensor)) for name, tensor in critic.weights().items())


def _check_dtypes(manifest: Manifest, critic: TrainedCritic) -> None:
    """Raise WeightsError if a stored tensor has another dtype than the published one."""
    weights = critic.weights()
    for name in weights:
        if manifest.base is not None and name not in manifest.tensors:  # an adapter, or a weight of the base
            continue
        stored, trained = manifest.tensors[name][0], STORED_AS.get(weights.dtype(name))
        if stored != trained:
            raise WeightsError(f"version {manifest.version}: {name} is {stored}, the published model's is {trained}")
