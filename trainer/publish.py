"""From trained weights to served weights: write a version, verify it, move CURRENT, wait until it is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from python_backend.config import CriticSection
from python_backend.config.sections import constants_of
from python_backend.models.modeling import CriticModel, load_critic, save_critic
from python_backend.store.control_key import control_key
from python_backend.store.weights import Manifest, WeightsError, WeightsStore
from trainer.control_plane import ControlPlaneError, LoadRefused
from trainer.servers import CriticServers, Loaded
from trainer.verification import VersionRejected, canary_row, verify_version

logger = logging.getLogger(__name__)
RECOVERY_PAUSE_S = 5.0
HEAL_EVERY_S = 1.0
WAIT_POLL_S = 0.001
HEAL_AFTER_S = 15.0  # whoever supervises the server is quicker, and knows its other models too


@dataclass(frozen=True)
class Reload:
    """How a version came into service."""

    version: int
    reload: str  # "swap" or "triton"
    publish_ms: float = 0.0  # writing the version
    verify_ms: float = 0.0
    reload_ms: float = 0.0  # from moving CURRENT (or calling load) to every instance serving it
    served_by: dict[str, int] = field(default_factory=dict)  # instances, or servers asked, and what each serves


class Publisher:
    """Publishes versions of one critic and brings them into service."""

    def __init__(
        self,
        store: WeightsStore,
        *,
        run_id: str,
        epoch: int,
        servers: Sequence[str],
        reload: str,
        timeout_s: float,
        keep: int,
        show_trouble: Callable[[str, str], None] = lambda state, trouble: None,
    ) -> None:
        """
        Args:
            servers: gRPC addresses of the critic's servers, as `trainer.servers`.
            reload: "swap" or "triton".
            timeout_s: for a load at one server, and until instances that lag are loaded anew.
            keep: newest versions kept.
            show_trouble: gets what is waited for and why it does not come, for the callers who wait as well.
        """
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._servers = CriticServers(servers, control_key(store.root))
        self._reload = reload
        self._timeout_s = timeout_s
        self._keep = keep
        self._show_trouble = show_trouble
        self._look_at = self._heal_at = 0.0
        self._died_at: float | None = None
        self.rejected = 0
        """Versions that were refused, here or by an instance."""

    def publish(
        self,
        critic: CriticModel,
        *,
        step: int,
        beat: Callable[[str], None],
        parent: int | None = None,
        write: Callable[[Path], None] | None = None,
    ) -> Reload:
        """Write, verify and serve the critic's weights.

        Args:
            critic: holds the trained weights.
            step: critic updates that made them.
            beat: called with a word on what is waited for.
            parent: version that these weights are a copy of (a rewind, a rollback): they get a new number in any case.
            write: puts the weights into a folder; default: as the critic holds them.

        Raises:
            VersionRejected: verification or an instance refused; CURRENT names the version before.
            OSError: the disk refuses; nothing was published.
        """
        start = time.monotonic()
        expected = critic.values([canary_row(critic)])[0]
        manifest = self._store.add(
            write or (lambda folder: save_critic(critic, folder)),
            run_id=self._run_id,
            step=step,
            parent=self._store.current() if parent is None else parent,
            epoch=self._epoch,
            reuse=parent is None,
        )
        written = time.monotonic()
        self._store.announce(manifest.version)  # the instances load it while it is verified
        try:
            self.verify(manifest.version, critic, expected)
            verified = time.monotonic()
            served_by = self._serve(manifest, beat)
        except (VersionRejected, WeightsError) as trouble:
            self.rejected += 1
            raise VersionRejected(str(trouble)) from trouble
        served = time.monotonic()
        self._store.prune(keep=self._keep)
        return Reload(
            manifest.version, self._reload, (written - start) * 1e3, (verified - written) * 1e3,
            (served - verified) * 1e3, served_by,
        )  # fmt: skip

    def verify(self, version: int, critic: CriticModel, expected: np.ndarray | None = None) -> None:
        """As `verify_version`."""
        verify_version(self._store, version, critic, expected)

    def triton_reload(self) -> Reload:
        """Have Triton start the critic anew: fresh processes that load what CURRENT names.

        Raises:
            ControlPlaneError: a server refused or did not answer; its old process serves on.
        """
        start = time.monotonic()
        outcomes = self._load()
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            raise ControlPlaneError("; ".join(f"{outcome.url}: {outcome.error}" for outcome in failed))
        versions = {outcome.url: outcome.version or 0 for outcome in outcomes}
        return Reload(
            self._store.current() or 0, "triton", reload_ms=(time.monotonic() - start) * 1e3, served_by=versions
        )

    def look(self) -> None:
        """What is to be done while there is nothing to train: see to instances that refuse CURRENT, or have died."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + HEAL_EVERY_S
        current = self._store.current()
        for record in self._store.serving():
            if current is not None and record.rejected == current and record.version is not None:
                logger.error("CURRENT named version %d, which %s refused: %s", current, record.name, record.error)
                self._store.set_current(record.version, back=True)
                break
        self.heal()

    def heal(self) -> list[Loaded]:
        """Triton does not restart a critic whose process was killed: ask for a fresh one; what came of it, if asked.

        Only where nobody else does: `tools serve` and `tools run` do.
        """
        now = time.monotonic()
        if now < self._heal_at:
            return []
        self._heal_at = now + HEAL_EVERY_S
        died = self._store.records.died()
        self._died_at = None if not died else self._died_at or now
        if self._died_at is None or now - self._died_at < HEAL_AFTER_S:
            return []
        logger.warning("%s died: asking Triton for a fresh critic", died[0].name)
        self._heal_at += RECOVERY_PAUSE_S
        return self._outcomes()

    def _serve(self, manifest: Manifest, beat: Callable[[str], None]) -> dict[str, int]:
        """Move CURRENT and wait until every live instance serves the version; back again if one refuses."""
        version, before = manifest.version, self._store.current()
        self._store.set_current(version)
        previous = manifest.parent if before == version else before  # equal: a replay after a crash
        if self._reload == "triton":
            self._reject_if_refused(version, previous, self._outcomes())
        recover_at = time.monotonic() + self._timeout_s
        while True:
            records = self._store.serving()
            refused = next((record for record in records if record.rejected == version), None)
            if refused is not None:
                self._go_back(refused.version)
                raise VersionRejected(f"version {version} was refused by {refused.name}: {refused.error}")
            if records and all(record.version is not None and record.version >= version for record in records):
                return {record.name: record.version for record in records if record.version is not None}
            beat(f"waiting until version {version} is served")
            self._reject_if_refused(version, previous, self.heal())  # it may be what they died of
            if time.monotonic() > recover_at:
                logger.warning("version %d is not served yet: asking Triton for a fresh critic", version)
                self._reject_if_refused(version, previous, self._outcomes())
                recover_at = time.monotonic() + RECOVERY_PAUSE_S
            time.sleep(WAIT_POLL_S)

    def _reject_if_refused(self, version: int, previous: int | None, outcomes: list[Loaded]) -> None:
        """Go back to `previous` if a fresh process cannot serve `version`. Raises VersionRejected then."""
        refusal = next((outcome for outcome in outcomes if isinstance(outcome.error, LoadRefused)), None)
        if refusal is not None:
            self._go_back(previous)
            self._outcomes()  # the others may have taken it up
            raise VersionRejected(f"version {version} was refused by {refusal.url}: {refusal.error}")
        failed = [f"{outcome.url}: {outcome.error}" for outcome in outcomes if outcome.error is not None]
        if failed:
            self._show_trouble(f"waiting until version {version} is served", "; ".join(failed))

    def _go_back(self, version: int | None) -> None:
        if version is not None:
            self._store.set_current(version, back=True)

    def _load(self) -> list[Loaded]:
        return self._servers.load(self._store.current() or 0, timeout_s=self._timeout_s)

    def _outcomes(self) -> list[Loaded]:
        """Reload all servers; one that cannot be reached loads CURRENT when it comes back, so it is only named."""
        try:
            outcomes = self._load()
        except ControlPlaneError as error:  # a name that cannot be resolved now
            logger.warning("%s", error)
            return []
        for outcome in outcomes:
            if outcome.error is not None:
                logger.warning("%s: %s", outcome.url, outcome.error)
        return outcomes


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
