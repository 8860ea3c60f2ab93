"""Publishes new weights: writes a version, verifies it, sets CURRENT, and waits until every instance serves it."""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_triton.checkpoints.inspection import CONFIG_FILE, CheckpointError, fingerprint_model, is_same_model
from rlhf_triton.client.control_plane import ControlPlaneError, Failure
from rlhf_triton.client.model_servers import Loaded, ModelServers
from rlhf_triton.config.labels import attribute_weights
from rlhf_triton.config.live_models import LiveModel, live_model, live_models
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import CriticSection, RewardSection, constants_of
from rlhf_triton.digests import digest_of
from rlhf_triton.models.modeling import CriticModel, RewardModel, load_critic, load_reward
from rlhf_triton.monitoring.tracing import span
from rlhf_triton.store.control_key import control_key
from rlhf_triton.store.weights import Manifest, Origin, WeightsError, WeightsStore, weights_files
from rlhf_triton.trainer.pretraining import pretrained
from rlhf_triton.trainer.training_set import tokenizer_of
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks

logger = logging.getLogger(__name__)
Working = Callable[[str], contextlib.AbstractContextManager[object]]
SERVE_TIMEOUT_S = 60.0  # how long to wait until every instance serves a version, before reloading through Triton
RECOVERY_PAUSE_S = 5.0  # between two reloads
CHECK_EVERY_S = 1.0
WAIT_POLL_S = 0.001
MODEL = "critic.model"
# Long enough for a supervisor (of `rlhf-triton serve` or `run`), which also restarts other models, to act first.
RELOAD_AFTER_S = 15.0


class VersionRejected(WeightsError):
    """A version failed verification, or an instance rejected it; the previous version serves."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Weights to publish."""

    write: Callable[[Path], Mapping[str, str] | None]  # writes them to a folder; returns as `CriticModel.write`
    verify: Callable[[WeightsStore, int], None]  # raises WeightsError if a version does not have them
    step: int = 0  # number of critic updates that produced them; 0 for a reward model
    # The version of which they are a copy, after a rewind or rollback; they then always get a new number. None: the
    # newest version is reused if it has the same content (a replay after a crash).
    parent: int | None = None
    source: Path | None = None  # the folder from which they are copied, for the manifest
    canary: list[float] | None = None  # outputs that instances compare, if `verify` has no whole model; else None


@dataclass(frozen=True, kw_only=True)
class Published:
    """The result of publishing a version, with timings."""

    version: int
    mode: str  # "swap" or "triton"
    publish_ms: float  # writing the version
    verify_ms: float
    reload_ms: float  # from moving CURRENT until every instance serves it
    served_by: dict[str, int]  # instance -> its version


class Publisher:
    """Publishes versions of a model, and rolls back versions that an instance rejects."""

    def __init__(
        self,
        config: RunConfig,
        store: WeightsStore,
        *,
        run_id: str,
        epoch: int,
        model: LiveModel | None = None,
        show_block: Callable[[str, str | None], None] = lambda state, reason: None,
    ) -> None:
        """Create a publisher.

        Args:
            model: the model whose versions to publish; default: the critic.
            show_block: called with the current state and the error that blocks it, to report it to waiting callers;
                None once the servers have reloaded the model.
        """
        settings = config.trainer
        model = model or live_model(config, "critic")
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._config = config
        self._model = model.served_as
        self._reload = model.reload
        self._keep = settings.publish.keep
        self._show_block = show_block
        self._maintain_at = self._check_instances_at = 0.0
        self._died_at: float | None = None
        self.rejected = 0
        """Number of versions rejected so far, by verification or by an instance."""

    def publish(self, publication: Publication, on_wait: Callable[[str], None]) -> Published:
        """Write, verify and serve weights.

        Args:
            on_wait: called repeatedly while waiting, with a description of the state.

        Raises:
            VersionRejected: verification or an instance rejected the version; CURRENT names the previous one.
            WeightsError: the store is damaged.
            OSError: a disk error; nothing was published.
        """
        start = time.monotonic()
        parent = publication.parent
        origin = Origin(
            run_id=self._run_id,
            step=publication.step,
            parent=self._store.current() if parent is None else parent,
            epoch=self._epoch,
            source=None if publication.source is None else str(publication.source),
        )
        canary = publication.canary
        # An instance that has refused a version never loads that number again, so another attempt needs a new one.
        refused = {record.staged if record.staging_error else record.rejected for record in self._store.serving()}
        reuse = parent is None and refused.isdisjoint(self._store.versions()[-1:])
        manifest = self._store.add(publication.write, origin, canary=canary, reuse=reuse)
        written = time.monotonic()
        self._store.announce(manifest.version)  # instances preload it during verification, so the swap is quick
        try:
            with span("verify", version=manifest.version):
                publication.verify(self._store, manifest.version)
                if canary is not None:
                    self.await_staging(manifest, on_wait)
            verified = time.monotonic()
            with span("reload", version=manifest.version):
                served_by = self._serve(manifest, on_wait)
        except WeightsError as error:
            self.rejected += 1
            raise VersionRejected(str(error)) from error
        served = time.monotonic()
        self._store.prune(keep=self._keep)
        return Published(
            version=manifest.version,
            mode=self._reload,
            publish_ms=(written - start) * 1e3,
            verify_ms=(verified - written) * 1e3,
            reload_ms=(served - verified) * 1e3,
            served_by=served_by,
        )

    def await_staging(self, manifest: Manifest, on_wait: Callable[[str], None]) -> None:
        """Wait until every live, serving instance has staged the version and reproduced the canary row's values.

        This checks the forward pass of a version that several ranks wrote, each of which has only a part of the critic.
        With `reload: triton`, new instances check the version when they start instead.

        Raises:
            WeightsError: an instance could not load the version, or its values differ.
        """
        version = manifest.version
        recover_at = time.monotonic() + SERVE_TIMEOUT_S
        while self._reload == "swap":
            records = [record for record in self._store.serving() if record.version != version]
            waiting = [record for record in records if record.staged != version]
            refused = next((record for record in records if record not in waiting and record.staging_error), None)
            if refused is not None:
                raise WeightsError(f"version {version} was refused by {refused.name}: {refused.staging_error}")
            if not waiting:
                return
            on_wait(f"waiting until version {version} is staged")
            self.reload_dead_instances()
            if time.monotonic() > recover_at:
                logger.warning("version %d is not staged yet: reloading %s through Triton", version, self._model)
                self._reload_all()
                recover_at = time.monotonic() + SERVE_TIMEOUT_S
            time.sleep(WAIT_POLL_S)

    def maintain(self, working: Working = contextlib.nullcontext) -> None:
        """Idle maintenance: roll CURRENT back if an instance rejects it, and replace dead instances.

        `working`: context manager around a reload, which may take as long as loading the model; receives a description.
        """
        if time.monotonic() < self._maintain_at:
            return
        self._maintain_at = time.monotonic() + CHECK_EVERY_S
        current = self._store.current()
        for record in self._store.serving():
            if current is not None and record.rejected == current and record.version is not None:
                logger.error("CURRENT named version %d, which %s refused: %s", current, record.name, record.error)
                self._store.set_current(record.version, back=True)
                break  # CURRENT has changed; check the other records again next time
        self.reload_dead_instances(working)

    def reload_dead_instances(self, working: Working = contextlib.nullcontext) -> list[Loaded]:
        """Reload the model if an instance died more than RELOAD_AFTER_S ago; return the outcomes, [] without a reload.

        Triton does not restart a killed model process. The supervisor in `rlhf-triton serve` and `run` does so sooner
        than RELOAD_AFTER_S; this is for servers without a supervisor.
        """
        now = time.monotonic()
        if now < self._check_instances_at:
            return []
        self._check_instances_at = now + CHECK_EVERY_S
        died = self._store.records.died()
        self._died_at = None if not died else self._died_at or now
        if self._died_at is None or now - self._died_at < RELOAD_AFTER_S:
            return []
        logger.warning("%s died: reloading %s through Triton", died[0].name, self._model)
        self._check_instances_at += RECOVERY_PAUSE_S
        with working(f"reloading {self._model} through Triton"):
            return self._reload_all()

    def _serve(self, manifest: Manifest, on_wait: Callable[[str], None]) -> dict[str, int]:
        """Set CURRENT and wait until every live instance serves the version; return each instance's version.

        If an instance rejects the version, sets CURRENT back and raises WeightsError.
        """
        version = manifest.version
        before = self._store.current()
        self._store.set_current(version)
        previous = manifest.parent if before == version else before  # equal in a replay after a crash
        if self._reload == "triton":
            self._reject_if_refused(version, previous, self._reload_all())
        recover_at = time.monotonic() + SERVE_TIMEOUT_S
        while True:
            records = self._store.serving()
            refused = next((record for record in records if record.rejected == version), None)
            if refused is not None:
                self._move_current_back(refused.version)
                raise WeightsError(f"version {version} was refused by {refused.name}: {refused.error}")
            if records and all(record.version is not None and record.version >= version for record in records):
                return {record.name: record.version for record in records if record.version is not None}
            on_wait(f"waiting until version {version} is served")
            # The new version may be what killed an instance.
            self._reject_if_refused(version, previous, self.reload_dead_instances())
            if time.monotonic() > recover_at:
                logger.warning("version %d is not served yet: reloading %s through Triton", version, self._model)
                self._reject_if_refused(version, previous, self._reload_all())
                recover_at = time.monotonic() + RECOVERY_PAUSE_S
            time.sleep(WAIT_POLL_S)

    def _reject_if_refused(self, version: int, previous: int | None, outcomes: list[Loaded]) -> None:
        """Move CURRENT back to `previous` and raise WeightsError if a server could not load `version`."""
        refusals = [each for each in outcomes if each.error is not None and each.error.kind is Failure.REFUSED]
        if refusals:
            refusal = refusals[0]
            self._move_current_back(previous)
            self._reload_all()  # servers that did load the rejected version must reload `previous`
            raise WeightsError(f"version {version} was refused by {refusal.url}: {refusal.error}")
        if outcomes:
            failed = [f"{outcome.url}: {outcome.error}" for outcome in outcomes if outcome.error is not None]
            self._show_block(f"waiting until version {version} is served", "; ".join(failed) or None)

    def _move_current_back(self, version: int | None) -> None:
        if version is not None:
            self._store.set_current(version, back=True)

    def _reload_all(self) -> list[Loaded]:
        """Reload all servers; return the outcomes and log the errors.

        An unreachable server is not an error: it loads the current version when it starts again.
        """
        try:
            addresses = self._config.trainer.servers or [self._config.server_url("grpc")]
            servers = ModelServers(addresses, control_key(self._store.root), model=self._model)
            outcomes = servers.load(self._store.current() or 0, timeout_s=SERVE_TIMEOUT_S)
        except ControlPlaneError as error:  # a DNS name could not be resolved
            logger.warning("%s", error)
            return []
        for outcome in outcomes:
            if outcome.error is not None:
                logger.warning("%s: %s", outcome.url, outcome.error)
        return outcomes


def initialise_store(
    store: WeightsStore,
    section: CriticSection,
    *,
    run_id: str,
    pretrain: Callable[[CriticModel], CriticModel] = lambda critic: critic,
) -> None:
    """Publish version 0 from the section's checkpoint, unless the store has one.

    Args:
        pretrain: trains the critic on `critic.pretrain`; called only if that is set.

    Raises:
        CheckpointError: the checkpoint cannot be a critic, or version 0 was made from another one or with other
            settings.
    """
    given = section.model_dump(mode="json", include={"standardization", "pretrain"})
    weights = [fingerprint_model(section.model), digest_of(section.model / CONFIG_FILE)]
    made_from = {MODEL: weights, **{f"critic.{key}": value for key, value in given.items()}}
    if store.current() is None and 0 not in store.versions():
        critic = load_critic(section.model, standardization=constants_of(section.standardization))
        if section.pretrain:
            critic = pretrain(critic)
        origin = Origin(
            run_id=run_id,
            tokenizer=tokenizer_of(section.model),
            made_from=made_from,
            source=str(section.model),
        )
        store.add(critic.write, origin)
    known = store.manifest(0).made_from or made_from
    if is_same_model(known[MODEL][0], weights[0]):
        known[MODEL][0] = weights[0]
    changed = [key for key, value in made_from.items() if value != known.get(key)]
    if changed:
        key = changed[0]
        now, before = (section.model, "another model") if key == MODEL else (made_from[key], known.get(key))
        raise CheckpointError(
            f"{key} is {now}, but was {before} when version 0 in {store.root} was made; restore it, or start a run in "
            "another folder (run.dir)"
        )
    if store.current() is None:
        store.set_current(0)


def reward_loader(section: RewardSection) -> Callable[..., RewardModel]:
    """Return `load_reward` with the settings of the served model."""
    return functools.partial(
        load_reward,
        pooling=section.pooling,
        attribute_weights=attribute_weights(section),
        standardization=constants_of(section.standardization),
    )


def initialise_stores(
    config: RunConfig, ranks: AnyRanks = ALONE, on_wait: Callable[[str], None] = lambda _: None
) -> None:
    """Publish version 0 of each model that is served from a weights store, unless it has one.

    Args:
        ranks, on_wait: see `pretrained`.

    Raises:
        CheckpointError: see `initialise_store`; or the reward model cannot be loaded.
        RlhfError: the critic cannot be pretrained.
    """
    for model in live_models(config):
        store = WeightsStore(model.store)
        if model.name == "critic":
            pretrain = functools.partial(pretrained, config=config, ranks=ranks, on_wait=on_wait)
            initialise_store(store, config.critic, run_id=config.run.identity, pretrain=pretrain)
        elif store.current() is None:
            reward_loader(config.reward)(config.reward.model).check_finite()
            write = functools.partial(copy_checkpoint, config.reward.model)
            origin = Origin(run_id=config.run.identity, source=str(config.reward.model))
            store.set_current(store.add(write, origin).version)


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Copy a checkpoint's weights and configuration, but no tokenizer: every version uses `reward.model`'s."""
    for path in (*weights_files(source), source / CONFIG_FILE):
        shutil.copyfile(path, folder / path.name)
