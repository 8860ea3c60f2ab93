"""The critic sidecar: follows the journal, trains on its entries, publishes the weights, and records the results."""

import contextlib
import logging
import threading
from dataclasses import dataclass, replace

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.store.journal import DamagedEntry, Entry, Journal, Result
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.checkpoint import CheckpointFolder
from rlhf_triton.trainer.critic_checkpoints import CriticCheckpoints
from rlhf_triton.trainer.critic_state import CriticState
from rlhf_triton.trainer.critic_versions import CriticVersions
from rlhf_triton.trainer.disk_retry import until_done
from rlhf_triton.trainer.pending_entries import PendingEntries
from rlhf_triton.trainer.progress import SidecarProgress
from rlhf_triton.trainer.publish import Publisher, initialise_stores
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks

logger = logging.getLogger(__name__)
IDLE_S = 0.005


def run_sidecar(config: RunConfig, stop: threading.Event, ranks: AnyRanks = ALONE) -> None:
    """Restore the critic and follow the journal until `stop` is set. Raises RlhfError if another sidecar follows it.

    `ranks`: the processes that train the critic, of which this is rank 0.
    """
    settings = config.trainer
    journal = Journal(config.run.journal_dir, config.run.identity)
    store = WeightsStore(config.run.weights_dir)
    folder = CheckpointFolder(config.run.critic_checkpoints_dir)
    with contextlib.ExitStack() as held:
        # Do not report errors in the heartbeat yet: until this process has the lock, it may be another sidecar's.
        epoch = until_done("starting", lambda: held.enter_context(journal.lock()), stop)
        progress = SidecarProgress(config, journal, epoch=epoch, stop=stop)
        progress.persist("tidying up the journal", journal.sweep)
        progress.persist("making version 0", lambda: initialise_stores(config, ranks, progress.wait))
        publisher = Publisher(config, store, run_id=journal.run_id, epoch=epoch, show_block=progress.show_block)
        set_log_position(version=store.current())
        critic = CriticState(config, store, journal, folder, progress, ranks)
        checkpoints = CriticCheckpoints(
            every=settings.checkpoint_every,
            critic=critic,
            folder=folder,
            store=store,
            journal=journal,
            progress=progress,
        )
        versions = CriticVersions(settings.publish.every, critic, publisher, store, progress)
        logger.info("following run %s from step %d, epoch %d", journal.run_id, critic.step, epoch)
        Sidecar(
            journal=journal,
            pending=PendingEntries(journal, progress),
            critic=critic,
            checkpoints=checkpoints,
            versions=versions,
            progress=progress,
        ).run(stop)


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """Trains one critic; the caller holds the journal's lock."""

    journal: Journal
    pending: PendingEntries
    critic: CriticState
    checkpoints: CriticCheckpoints
    versions: CriticVersions
    progress: SidecarProgress

    def run(self, stop: threading.Event) -> None:
        """Process entry after entry until `stop` is set, then write a checkpoint."""
        while not stop.is_set():
            entry = self.pending.next(trained=self.critic.step)
            if entry is None:
                self.progress.renew_heartbeat("idle")
                self.versions.publisher.maintain(self.progress.working)
                stop.wait(IDLE_S)
            elif entry.kind == "rewind":
                self.pending.finish(entry, self.rewind(entry))
            elif entry.kind == "save":
                self.pending.finish(entry, self.save(entry))
            elif entry.step <= self.critic.step:
                self.pending.finish(entry, self.checkpoints.lost_result(entry))
            else:
                self.train(entry)
        self.checkpoints.write_last()
        logger.info("stopped after step %d", self.critic.step)

    def train(self, entry: Entry) -> None:
        """Train on the next step, publish the weights, and record the result."""
        answered = self.journal.result(entry) is not None  # a replay after a crash: already published
        report, result = self.critic.train(entry)
        if not answered:
            published, error = self.versions.publish_step() if result.error is None else (None, result.error)
            version = published.version if published else self.versions.current()
            self.pending.finish(entry, replace(result, weights_version=version, error=error))
            if report is not None:
                self.progress.log_update(entry.step, version, report, published)
            if error is not None:
                self.progress.log_failure(entry.step, version, error, self.versions.publisher, self.critic.update)
        self.checkpoints.write_periodically()

    def save(self, entry: Entry) -> Result:
        """Write a checkpoint of the entry's step; remove those that the caller no longer needs; return the result."""
        try:
            keep_steps = self.journal.requested_keep_steps(entry)
        except DamagedEntry as damage:  # the caller gets the error
            return Result(entry=entry.name, weights_version=self.versions.current(), error=str(damage))
        # A rejected version leaves the checkpoint on disk and the old version serving.
        error = self.checkpoints.write_step(entry.step) or self.versions.publish_remainder()
        if error is None and keep_steps is not None:
            self.checkpoints.keep_only(keep_steps, step=entry.step)
        return Result(entry=entry.name, weights_version=self.versions.current(), error=error)

    def rewind(self, entry: Entry) -> Result:
        """Restore step `entry.target`, set later entries aside, publish the weights again; return the result."""
        owners = self.journal.owners(entry)
        if entry.target == entry.step == self.critic.step:  # a new or resumed run, already at the target
            self.checkpoints.set_aside_after(entry)  # a save of the next step, which an earlier owner has sent
            self.checkpoints.write_requested()
            error = self.versions.ensure_served()  # the result promises that the weights of this step are served
        elif (unreachable := self.critic.restore(entry.target)) is not None:
            # the run's previous owner remains its owner
            error = f"rewind_to: {unreachable}"
            owners = owners[1:]
            self.critic.restore_newest()
        else:  # restored first, so that the journal is unchanged if that fails
            aside = self.checkpoints.set_aside_after(entry)
            error = self.versions.publish_again()
            logger.warning("rewound from step %d to step %d; later entries are in %s", entry.step, entry.target, aside)
            self.checkpoints.write_requested()
        return Result(entry=entry.name, weights_version=self.versions.current(), error=error, owners=owners)
