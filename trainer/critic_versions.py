"""Publishes the weights of the critic in training after steps, saves and rewinds."""

import functools
from dataclasses import dataclass

from rlhf_triton.models.canary import canary_outputs
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.monitoring.tracing import span
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.critic_state import CriticState
from rlhf_triton.trainer.progress import SidecarProgress
from rlhf_triton.trainer.publish import Publication, Published, Publisher, VersionRejected
from rlhf_triton.trainer.verification import holds_weights, verify_version


@dataclass(frozen=True)
class CriticVersions:
    """Publishes the critic in training."""

    every: int
    critic: CriticState
    publisher: Publisher
    store: WeightsStore
    progress: SidecarProgress

    def current(self) -> int:
        """Return the version that CURRENT names."""
        return self.store.current() or 0

    def publish_step(self) -> tuple[Published | None, str | None]:
        """Publish the critic if its step is a multiple of `publish.every`.

        Returns (published, None), (None, error), or (None, None) if nothing is published at this step.
        """
        return self._publish() if self.critic.step % self.every == 0 else (None, None)

    def publish_remainder(self) -> str | None:
        """Publish updates that are not served, as `publish.every` is above 1 or the newest version was rejected.

        Returns the error, if any.
        """
        is_rejected = self.store.versions()[-1] != self.current()
        is_held_back = self.every > 1 and self.store.manifest(self.current()).step < self.critic.step
        return self._publish()[1] if is_rejected or is_held_back else None

    def ensure_served(self) -> str | None:
        """Publish the critic again unless its weights are served already; return the error, if any.

        They may not be served because the step's version was rejected or skipped, or an operator rolled back.
        """
        with self.progress.working("comparing the served weights"):
            served = holds_weights(self.store, self.current(), self.critic.update.critic)
        return None if served else self.publish_again()

    def publish_again(self) -> str | None:
        """Publish the critic as a new version, even if its weights were published before; return the error, if any."""
        step = self.critic.step
        parent = max(manifest.version for manifest in self.store.manifests() if manifest.step <= step)
        return self._publish(parent)[1]

    def _publish(self, parent: int | None = None) -> tuple[Published | None, str | None]:
        """Publish the critic, with retries after disk errors; return the result, or the error if it is rejected."""
        step = self.critic.step
        newest = self.store.versions()[-1]

        def attempt() -> Published:
            # With a parent, every attempt would write another version. If an earlier attempt has written one already,
            # publish without it, which reuses the newest version if its content is the same.
            written = self.store.versions()[-1] > newest
            critic = self.critic.update.critic
            publication = Publication(
                write=critic.write,
                verify=functools.partial(verify_version, critic=critic),
                step=step,
                parent=None if written else parent,
                canary=canary_outputs(critic).tolist() if critic.ranks.shards else None,
            )
            return self.publisher.publish(publication, self.progress.wait)

        try:
            with span("publish", parent=self.critic.traceparent, step=step):
                published = self.progress.persist(f"publishing step {step}", attempt)
        except VersionRejected as error:  # the caller gets the error; the old version keeps serving
            return None, str(error)
        set_log_position(version=published.version)
        return published, None
