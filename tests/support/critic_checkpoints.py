"""States of the critic's checkpoints."""

from rlhf_triton.trainer.checkpoint import CheckpointState


def state(step, update):
    """The state of an update after `step`, as the sidecar would save it."""
    return CheckpointState(
        run_id="run",
        step=step,
        optimizer_step=update.trained.optimizer_step,
        version=step,
        epoch=1,
        asked=False,
        settings=update.trained.settings,
        base_digest="a hash",
        results=[{"entry": "x"}],
    )
