"""The checks that a version must pass before CURRENT may name it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.errors import RlhfError
from python_backend.models.loading import STORED_DTYPES
from python_backend.models.modeling import CriticModel, load_critic
from python_backend.store.weights import Manifest, WeightsError, WeightsStore

CANARY_TOKENS = 16
CANARY_TOLERANCE = 1e-5
STORED_AS = {dtype: name for name, dtype in STORED_DTYPES.items()}


class VersionRejected(RlhfError):
    """A version did not pass, here or at an instance; the old one serves on."""


def canary_row(critic: CriticModel) -> np.ndarray:
    """The row of token ids, int64 `[16]`, whose values are compared before and after."""
    return np.arange(CANARY_TOKENS, dtype=np.int64) % critic.limits.vocab_size


def verify_version(store: WeightsStore, version: int, critic: CriticModel, expected: np.ndarray | None = None) -> None:
    """Hash, names, shapes, dtypes, finite values, and a forward through the serving code.

    Args:
        critic: whose weights the version should hold.
        expected: its values of the canary row, where they are known already.

    Raises:
        VersionRejected: the message names version and cause.
    """
    try:
        with ThreadPoolExecutor(
            1, "hash"
        ) as beside:  # of a large file it takes longest, and leaves Python's lock alone
            whole = beside.submit(store.verify_files, version)
            try:
                staged = critic.with_weights(store.folder(version))
                staged.check_finite()
                served = staged.values([canary_row(critic)])[0]
            finally:
                manifest = whole.result()  # that a file is damaged says more than what came of it
    except (WeightsError, CheckpointError) as error:
        raise _rejected(version, error) from error
    _check_dtypes(manifest, critic)
    trained = critic.values([canary_row(critic)])[0] if expected is None else expected
    difference = float(np.abs(served - trained).max())
    if not difference <= CANARY_TOLERANCE * max(1.0, float(np.abs(trained).max())):
        raise VersionRejected(
            f"version {version}: the canary's values differ by {difference:.3g} from the trained critic"
        )


def verify_alone(store: WeightsStore, version: int) -> Manifest:
    """As `verify_version` for a version whose trained critic is not at hand: it must be whole, finite, and answer.

    Raises:
        VersionRejected: the message names version and cause.
    """
    try:
        manifest = store.verify_files(version)
        critic = load_critic(store.folder(version))
        critic.check_finite()
    except (WeightsError, CheckpointError) as error:
        raise _rejected(version, error) from error
    if not np.isfinite(critic.values([canary_row(critic)])[0]).all():
        raise VersionRejected(f"version {version}: the canary's values are not finite")
    return manifest


def holds_weights(store: WeightsStore, version: int, critic: CriticModel) -> bool:
    """Whether `version` has the critic's weights, bit for bit."""
    try:
        stored = critic.with_weights(store.folder(version)).model.state_dict()
    except CheckpointError:
        return False
    return all(torch.equal(tensor, stored[name]) for name, tensor in critic.model.state_dict().items())


def _rejected(version: int, error: Exception) -> VersionRejected:
    text = str(error)
    return VersionRejected(text if f"version {version}" in text else f"version {version}: {text}")


def _check_dtypes(manifest: Manifest, critic: CriticModel) -> None:
    """What is stored must be of the types that were trained."""
    for name, tensor in critic.model.state_dict().items():
        stored, trained = manifest.tensors[name][0], STORED_AS.get(tensor.dtype)
        if stored != trained:
            raise VersionRejected(f"version {manifest.version}: {name} is {stored}, the trained critic's is {trained}")
