"""The checks that a version must pass before CURRENT may name it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.checkpoints.tensor_file import STORED_AS
from python_backend.errors import RlhfError
from python_backend.models.canary import canary_difference, canary_row
from python_backend.models.modeling import CriticModel, load_critic
from python_backend.store.weights import Manifest, WeightsError, WeightsStore

CANARY_TOLERANCE = 1e-5  # relative to the largest value: equal weights differ by rounding at most
CROSS_DEVICE_TOLERANCE = 1e-3  # if one forward pass runs on a GPU and the other one on the CPU


class VersionRejected(RlhfError):
    """A version failed verification, or an instance rejected it; the previous version keeps serving."""


def verify_version(store: WeightsStore, version: int, critic: CriticModel, expected: np.ndarray | None = None) -> None:
    """Verify that `version` holds the weights of `critic`.

    Checks the hash, names, shapes and dtypes, that all weights are finite, and that a forward pass through the serving
    code gives the critic's values for the canary row.

    Args:
        critic: the trained critic.
        expected: the critic's values for the canary row, if known already.

    Raises:
        VersionRejected: a check failed; the message names the version and the cause.
    """
    try:
        # Hashing takes the longest for large files, and releases the GIL: run it in parallel to the other checks.
        with ThreadPoolExecutor(1, "hash") as beside:
            whole = beside.submit(store.verify_files, version)
            try:
                staged = critic.with_weights(store.folder(version))
                staged.check_finite()
                served = staged.values([canary_row(critic)])[0]
                tolerance = CANARY_TOLERANCE if staged.model.device == critic.model.device else CROSS_DEVICE_TOLERANCE
            finally:
                manifest = whole.result()  # a damaged file's own error replaces the errors that it caused above
    except (WeightsError, CheckpointError) as error:
        raise rejected(version, error) from error
    _check_dtypes(manifest, critic)
    trained = critic.values([canary_row(critic)])[0] if expected is None else expected
    difference = canary_difference(served, trained)
    if not difference <= tolerance:
        raise VersionRejected(
            f"version {version}: the values for the canary row differ by {difference:.3g} from the trained critic's"
        )


def verify_alone(store: WeightsStore, version: int) -> Manifest:
    """Verify a version from its files only, without comparing it with the critic in memory that produced it.

    Checks that the files are intact, and that the weights and the values for the canary row are finite; returns the
    manifest.

    Raises:
        VersionRejected: a check failed; the message names the version and the cause.
    """
    try:
        manifest = store.verify_files(version)
        critic = load_critic(store.folder(version))
        critic.check_finite()
    except (WeightsError, CheckpointError) as error:
        raise rejected(version, error) from error
    if not np.isfinite(critic.values([canary_row(critic)])[0]).all():
        raise VersionRejected(f"version {version}: the values for the canary row are not finite")
    return manifest


def holds_weights(store: WeightsStore, version: int, critic: CriticModel) -> bool:
    """Return whether `version` has the critic's weights, bit for bit."""
    try:
        stored = critic.with_weights(store.folder(version)).model.state_dict()
    except CheckpointError:
        return False
    return all(torch.equal(tensor, stored[name]) for name, tensor in critic.weights().items())


def rejected(version: int, error: Exception) -> VersionRejected:
    """Return the error of a version that failed a check with `error`; its message names the version."""
    text = str(error)
    return VersionRejected(text if f"version {version}" in text else f"version {version}: {text}")


def _check_dtypes(manifest: Manifest, critic: CriticModel) -> None:
    """Raise VersionRejected if a stored tensor has another dtype than the trained one."""
    for name, dtype in critic.dtypes().items():
        if manifest.base is not None and name not in manifest.tensors:  # an adapter, or a weight of the base
            continue
        stored, trained = manifest.tensors[name][0], STORED_AS.get(dtype)
        if stored != trained:
            raise VersionRejected(f"version {manifest.version}: {name} is {stored}, the trained critic's is {trained}")
