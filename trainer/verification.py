"""Verifies versions before CURRENT may name them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from rlhf_triton.checkpoints.inspection import INDEX_FILE, CheckpointError
from rlhf_triton.checkpoints.safetensors_header import TensorInfo, read_header
from rlhf_triton.checkpoints.tensor_file import STORED_AS
from rlhf_triton.digests import digest_of_mapped
from rlhf_triton.errors import RankFailed
from rlhf_triton.models.canary import SERVED_TOLERANCE, canary_difference, canary_outputs
from rlhf_triton.models.modeling import CriticModel, RewardModel, load_critic
from rlhf_triton.store.weights import Manifest, WeightsError, WeightsStore, weights_files
from rlhf_triton.trainer.trained_critic import TrainedCritic

AnyModel: TypeAlias = CriticModel | RewardModel
CANARY_TOLERANCE = 1e-5  # relative to the largest value; equal weights differ by rounding only
CROSS_DEVICE_TOLERANCE = 1e-3  # if one forward pass runs on a GPU and the other on the CPU


def verify_version(store: WeightsStore, version: int, critic: TrainedCritic) -> None:
    """Verify that `version` has the weights of a critic in training.

    Checks as `verify_copy`, and the dtypes of all weights. A sharded critic compares its slices instead; instances that
    stage the version check its forward pass.

    Raises:
        WeightsError: a check failed; the message names the version and the cause.
    """
    if critic.ranks.shards:
        try:
            return critic.verify_slices(store, version)
        except (CheckpointError, RankFailed) as error:
            raise WeightsError(f"version {version}: {error}") from error
    manifest, staged, outputs = _load_verified(store, version, critic)
    _check_dtypes(store.folder(version), manifest, critic)
    tolerance = None if critic.stored_as is None else SERVED_TOLERANCE[critic.stored_as]
    _compare_outputs(version, critic, staged, outputs, tolerance)


def verify_copy(store: WeightsStore, version: int, model: AnyModel) -> None:
    """Verify that `version` has the weights of `model`, in any dtype.

    Checks hashes, names and shapes, that all weights are finite, and that a forward pass through the serving code
    reproduces the model's values or rewards for the canary row.

    Raises:
        WeightsError: a check failed; the message names the version and the cause.
    """
    _, staged, outputs = _load_verified(store, version, model)
    _compare_outputs(version, model, staged, outputs)


def _load_verified(store: WeightsStore, version: int, model: AnyModel) -> tuple[Manifest, AnyModel, np.ndarray]:
    """Return the manifest of an intact version, its model and this model's outputs for the canary row."""
    try:
        # Hashing releases the GIL, so it runs in parallel with the other checks.
        with ThreadPoolExecutor(1, "hash") as executor:
            whole = executor.submit(store.verify_files, version, digest_of_mapped)
            try:
                staged = model.with_weights(store.folder(version))
                staged.check_finite()
                outputs = canary_outputs(staged)
            finally:
                manifest = whole.result()  # the error about a damaged file replaces the errors that the file has caused
    except CheckpointError as error:
        raise WeightsError(f"version {version}: {error}") from error
    return manifest, staged, outputs


def _compare_outputs(
    version: int, model: AnyModel, staged: AnyModel, outputs: np.ndarray, tolerance: float | None = None
) -> None:
    """Raise WeightsError if the outputs of a staged version differ from the model's; `tolerance`: default by device."""
    if tolerance is None:
        tolerance = CANARY_TOLERANCE if staged.model.device == model.model.device else CROSS_DEVICE_TOLERANCE
    difference = canary_difference(outputs, canary_outputs(model))
    if not difference <= tolerance:
        raise WeightsError(
            f"version {version}: the values for the canary row differ by {difference:.3g} from the published model's"
        )


def verify_alone(store: WeightsStore, version: int, load: Callable[[Path], AnyModel] = load_critic) -> Manifest:
    """Verify a version from its files only, without the model in memory that produced it; return the manifest.

    Checks that the files are intact, and that the weights and the outputs for the canary row are finite.

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


def holds_weights(store: WeightsStore, version: int, critic: TrainedCritic) -> bool:
    """Return whether `version` is intact and its weights are bit-identical to the critic's, in the versions' dtype."""
    try:
        store.verify_hashes(store.manifest(version), digest_of_mapped)
        if critic.ranks.shards:
            return critic.holds_slices(store, version)
        stored = critic.with_weights(store.folder(version)).model.state_dict()
    except (CheckpointError, WeightsError):
        return False
    return all(torch.equal(tensor, stored[name].to(tensor)) for name, tensor in critic.weights().items())


def _check_dtypes(folder: Path, manifest: Manifest, critic: TrainedCritic) -> None:
    """Raise WeightsError if a stored tensor's dtype differs from the published model's."""
    weights = critic.weights()
    tensors = dict[str, TensorInfo]()
    for path in weights_files(folder):
        if path.name != INDEX_FILE:
            tensors |= read_header(path)
    for name in weights:
        if manifest.base is not None and name not in tensors:  # stored as an adapter, or in the base version
            continue
        stored = tensors[name].dtype
        trained = STORED_AS.get(weights.dtype(name))
        if stored != trained:
            raise WeightsError(
                f"version {manifest.version}: {name} has dtype {stored}, but the published model's has {trained}"
            )
