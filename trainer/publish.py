"""From trained weights to served weights: write a version, verify it, move CURRENT, wait until it is served.
Given: the weights store and a critic. Returns: the version served and how long each part took.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from python_backend.checkpoints import CheckpointError
from python_backend.config import CriticSection
from python_backend.contract import CRITIC
from python_backend.modeling import CriticModel, load_critic, save_critic
from python_backend.sections import constants_of
from python_backend.weights import WeightsError, WeightsStore
from trainer.control_plane import ControlPlane, ControlPlaneError

logger = logging.getLogger(__name__)
CANARY_TOKENS = 16
CANARY_TOLERANCE = 1e-5
RECOVERY_PAUSE_S = 5.0
HEAL_EVERY_S = 1.0
HEAL_AFTER_S = 15.0  # whoever supervises the server is quicker, and knows its other models too


class VersionRejected(RuntimeError):
    """A version did not pass, here or at an instance; the old one serves on."""


@dataclass(frozen=True)
class Reload:
    """How a version came into service."""

    version: int
    reload: str  # "swap" or "triton"
    publish_ms: float = 0.0  # writing the version
    verify_ms: float = 0.0
    reload_ms: float = 0.0  # from moving CURRENT (or calling load) to every instance serving it


class Publisher:
    """Publishes versions of one critic and brings them into service."""

    def __init__(
        self, store: WeightsStore, *, run_id: str, epoch: int, grpc_url: str, reload: str, timeout_s: float, keep: int
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._grpc_url = grpc_url
        self._reload = reload
        self._timeout_s = timeout_s
        self._keep = keep
        self._heal_at = 0.0
        self._died_at: float | None = None

    def publish(
        self, critic: CriticModel, *, step: int, beat: Callable[[str], None], parent: int | None = None
    ) -> Reload:
        """Write, verify and serve the critic's weights.

        Args:
            critic: holds the trained weights.
            step: critic updates that made them.
            beat: called with a word on what is waited for.
            parent: version that these weights are a copy of (a rewind): they get a new number in any case.

        Raises:
            VersionRejected: verification or an instance refused; CURRENT names the version before.
            OSError: the disk refuses; nothing was published.
        """
        start = time.monotonic()
        manifest = self._store.add(
            lambda folder: save_critic(critic, folder),
            run_id=self._run_id,
            step=step,
            parent=self._store.current() if parent is None else parent,
            epoch=self._epoch,
            reuse=parent is None,
        )
        written = time.monotonic()
        self.verify(manifest.version, critic)
        verified = time.monotonic()
        current = self._store.current()
        if current is None or current < manifest.version:
            self._store.set_current(manifest.version)
        how = self._reload
        if how == "triton":
            self._try_load()
        self._wait_served(manifest.version, current, beat)
        served = time.monotonic()
        self._store.prune(keep=self._keep)
        return Reload(
            manifest.version, how, (written - start) * 1e3, (verified - written) * 1e3, (served - verified) * 1e3
        )

    def verify(self, version: int, critic: CriticModel) -> None:
        """Hash, names, shapes, finite values, and a forward through the serving code. Raises VersionRejected."""
        try:
            self._store.verify_files(version)
            staged = critic.with_weights(self._store.folder(version))
        except (WeightsError, CheckpointError) as error:
            raise VersionRejected(str(error)) from error
        for name, parameter in staged.model.named_parameters():
            if not parameter.sum().isfinite():  # one sum finds NaN and infinity a tenth as dearly as isfinite
                raise VersionRejected(f"version {version}: {name} holds values that are not finite")
        row = np.arange(CANARY_TOKENS, dtype=np.int64) % critic.limits.vocab_size
        served, trained = staged.values([row])[0], critic.values([row])[0]
        difference = float(np.abs(served - trained).max())
        if not difference <= CANARY_TOLERANCE * max(1.0, float(np.abs(trained).max())):
            raise VersionRejected(
                f"version {version}: the canary's values differ by {difference:.3g} from the trained critic"
            )

    def triton_reload(self) -> Reload:
        """Have Triton start the critic anew: a fresh process that loads what CURRENT names.

        Raises:
            ControlPlaneError: Triton refused or did not answer; the old process serves on.
        """
        start = time.monotonic()
        self._load()
        return Reload(self._store.current() or 0, "triton", reload_ms=(time.monotonic() - start) * 1e3)

    def _load(self) -> None:
        label = f"{self._store.current()}-{uuid.uuid4().hex[:8]}"
        with ControlPlane(self._grpc_url) as control:
            control.load(CRITIC, parameters={"weights_version": label}, timeout_s=self._timeout_s)

    def _wait_served(self, version: int, previous: int | None, beat: Callable[[str], None]) -> None:
        recover_at = time.monotonic() + self._timeout_s
        while True:
            records = self._store.serving()
            refusal = next((record for record in records if record.rejected == version), None)
            if refusal is not None and previous is not None:
                self._store.set_current(previous)
                raise VersionRejected(f"version {version} was refused by {refusal.instance}: {refusal.error}")
            if records and all(record.version >= version for record in records):
                return
            beat(f"waiting until version {version} is served")
            self.heal()
            if time.monotonic() > recover_at:
                logger.warning("version %d is not served yet: asking Triton for a fresh critic", version)
                self._try_load()
                recover_at = time.monotonic() + RECOVERY_PAUSE_S
            time.sleep(0.002)

    def heal(self) -> bool:
        """Triton does not restart a critic whose process was killed: ask for a fresh one; true if it came.

        Only where nobody else does: `tools serve` and `tools run` do.
        """
        now = time.monotonic()
        if now < self._heal_at:
            return False
        self._heal_at = now + HEAL_EVERY_S
        died = self._store.died()
        self._died_at = None if not died else self._died_at or now
        if self._died_at is None or now - self._died_at < HEAL_AFTER_S:
            return False
        logger.warning("%s (pid %d) died: asking Triton for a fresh critic", died[0].instance, died[0].pid)
        self._heal_at += RECOVERY_PAUSE_S
        return self._try_load()

    def _try_load(self) -> bool:
        try:
            self._load()
        except ControlPlaneError as error:  # the server may be down: keep waiting, the update is on disk
            logger.warning("%s", error)
            return False
        return True


def initialise_store(store: WeightsStore, section: CriticSection, *, run_id: str) -> None:
    """Make version 0 from the section's checkpoint, unless the store has a version. Raises CheckpointError."""
    if store.current() is not None:
        return
    critic = load_critic(
        section.checkpoint,
        standardization=constants_of(section.standardization),
        attribute_weights=section.attribute_weights,
    )
    manifest = store.add(lambda folder: save_critic(critic, folder), run_id=run_id, step=0, parent=None, epoch=0)
    store.set_current(manifest.version)
