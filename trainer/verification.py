"""The checks that a version must pass before CURRENT may name it."""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.checkpoints.inspection import CONFIG_FILE, CheckpointError
from rlhf_triton.checkpoints.safetensors_header import read_header
from rlhf_triton.checkpoints.tensor_file import STORED_AS, raw_bytes
from rlhf_triton.digests import Hasher, digest_of, digest_of_mapped
from rlhf_triton.errors import RlhfError
from rlhf_triton.learning.ranks import RankFailed
from rlhf_triton.python_backend.models.canary import SERVED_TOLERANCE, canary_difference, canary_outputs
from rlhf_triton.python_backend.models.loading import check_sums
from rlhf_triton.python_backend.models.modeling import CriticModel, RewardModel, load_critic
from rlhf_triton.store.weights import Manifest, WeightsError, WeightsStore
from rlhf_triton.trainer.trained_critic import TrainedCritic

CANARY_TOLERANCE = 1e-5  # relative to the largest value: equal weights differ by rounding at most
SUMMED_AT_ONCE = 1 << 20  # elements: the sum finds them in the cache, where the digest left them
CROSS_DEVICE_TOLERANCE = 1e-3  # if one forward pass runs on a GPU and the other one on the CPU


class VersionRejected(RlhfError):
    """A version failed verification, or an instance rejected it; the previous version keeps serving."""


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
        VersionRejected: a check failed; the message names the version and the cause.
    """
    if isinstance(model, TrainedCritic) and model.in_slices:
        try:
            model.verify_slices(store, version)
        except (WeightsError, CheckpointError, RankFailed) as error:
            raise _rejected(version, error) from error
        return
    staged: CriticModel | RewardModel
    try:
        if isinstance(model, CriticModel) and model.model.device.type == "cpu":
            manifest, staged = _load_and_hash(store, version, model)
            served = canary_outputs(staged)
        else:
            # Hashing releases the GIL: run it in parallel to the other checks.
            with ThreadPoolExecutor(1, "hash") as beside:
                whole = beside.submit(store.verify_files, version, digest_of_mapped)
                try:
                    staged = model.with_weights(store.folder(version))
                    staged.check_finite()
                    served = canary_outputs(staged)
                finally:
                    manifest = whole.result()  # a damaged file's own error replaces the errors that it caused above
    except (WeightsError, CheckpointError) as error:
        raise _rejected(version, error) from error
    tolerance = CANARY_TOLERANCE if staged.model.device == model.model.device else CROSS_DEVICE_TOLERANCE
    if isinstance(model, CriticModel) and model.stored_as is not None:
        tolerance = SERVED_TOLERANCE[model.stored_as]
    if isinstance(model, TrainedCritic):  # others are copies of a checkpoint, in any dtype
        _check_dtypes(manifest, model)
    difference = canary_difference(served, canary_outputs(model) if expected is None else expected)
    if not difference <= tolerance:
        raise VersionRejected(
            f"version {version}: the values for the canary row differ by {difference:.3g} from the published model's"
        )


def _load_and_hash(store: WeightsStore, version: int, critic: CriticModel) -> tuple[Manifest, CriticModel]:
    """Map a version's weights, then verify their digest and that they are finite in one pass over these pages.

    Raises:
        WeightsError, CheckpointError: a check failed.
    """
    try:
        staged = critic.with_weights(store.folder(version))
    except CheckpointError:
        store.verify_files(version)  # a damaged file's own error replaces the one that it caused
        raise
    sums: dict[str, Tensor] = {}
    try:
        manifest = store.verify_files(version, functools.partial(_digest_of_mapped, staged.model.state_dict(), sums))
    except WeightsError:  # a file is damaged, or adapters were merged into the tensors of their base
        manifest = store.verify_files(version, digest_of_mapped)
        sums.clear()
    if sums:
        check_sums(sums)
    else:
        staged.check_finite()
    return manifest, staged


def _digest_of_mapped(tensors: Mapping[str, Tensor], sums: dict[str, Tensor], path: Path, algorithm: str) -> str:
    """Return the digest of a file from the tensors that were mapped from it, and add the sum of each to `sums`.

    If one of them is missing or has another dtype, the file itself is hashed, and nothing is added.
    """
    if path.name == CONFIG_FILE:
        return digest_of(path, algorithm)
    header = read_header(path)
    names = sorted(header, key=lambda name: header[name].start)
    if any(name not in tensors or STORED_AS[tensors[name].dtype] != header[name].dtype for name in names):
        return digest_of_mapped(path, algorithm)
    with path.open("rb") as file:
        hasher = Hasher(algorithm, file.read(header[names[0]].start))
        for name in names:
            total = torch.zeros((), dtype=torch.float64)
            for block in tensors[name].reshape(-1).split(SUMMED_AT_ONCE):
                hasher.update(raw_bytes(block))
                total += block.sum()
            sums[name] = total
        file.seek(header[names[-1]].start + header[names[-1]].num_bytes)
        hasher.update(file.read())  # nothing, unless the file is damaged
    return hasher.digest()


def verify_alone(
    store: WeightsStore, version: int, load: Callable[[Path], CriticModel | RewardModel] = load_critic
) -> Manifest:
    """Verify a version from its files only, without comparing it with the model in memory that produced it.

    Checks that the files are intact, and that the weights and the outputs for the canary row are finite; returns the
    manifest.

    Args:
        load: loads the model from a version's folder.

    Raises:
        VersionRejected: a check failed; the message names the version and the cause.
    """
    try:
        manifest = store.verify_files(version)
        model = load(store.folder(version))
        model.check_finite()
    except (WeightsError, CheckpointError) as error:
        raise _rejected(version, error) from error
    if not np.isfinite(canary_outputs(model)).all():
        raise VersionRejected(f"version {version}: the values for the canary row are not finite")
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


def _rejected(version: int, error: Exception) -> VersionRejected:
    """Return the error of a version that failed a check with `error`; its message names the version."""
    text = str(error)
    return VersionRejected(text if f"version {version}" in text else f"version {version}: {text}")


def _check_dtypes(manifest: Manifest, critic: TrainedCritic) -> None:
    """Raise VersionRejected if a stored tensor has another dtype than the published one."""
    weights = critic.weights()
    for name in weights:
        if manifest.base is not None and name not in manifest.tensors:  # an adapter, or a weight of the base
            continue
        stored, trained = manifest.tensors[name][0], STORED_AS.get(weights.dtype(name))
        if stored != trained:
            raise VersionRejected(f"version {manifest.version}: {name} is {stored}, the published model's is {trained}")
