"""`python -m rlhf_triton.actor --config YAML [section.key=value …]`: the training loop of one run.

Exit codes: 0 after the final policy and actor_summary.json are written; 2 after an error, which is reported in one
sentence; 130 after Ctrl-C or SIGTERM, normally with a checkpoint of the last complete step.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_triton.actor.run.row_limits import check_lengths
from rlhf_triton.config.command_line import (
    add_accept_changes,
    interrupt_on_signals,
    limit_access,
    log_to_stderr,
    report,
    run_parser,
)
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.required_files import check_devices, check_files
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import REPORTED
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.monitoring.tracing import tracing
from rlhf_triton.process import long_lived_imports
from rlhf_triton.training_engine.launch import ended, launch_ranks, stop_signals

if TYPE_CHECKING:
    from rlhf_triton.training_engine.ranks import AnyRanks


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the training loop and return the exit code."""
    parser = run_parser("Train the policy.", prog="python -m rlhf_triton.actor")
    add_accept_changes(parser)
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        limit_access(config.run)
        log_to_stderr("actor", config.run, gpus=config.gpu_precisions)
        check_files(config, actor=True)
        check_devices(config, "actor.policy")
        check_lengths(config)
        launch_ranks(config.actor.ranks, "rlhf_triton.actor", sys.argv[1:] if argv is None else argv, key="actor.ranks")
        if os.environ.get("RANK", "0") == "0":
            interrupt_on_signals(stop_signals())
            with tracing("actor", config.run.trace_endpoint, config.run.identity):
                return ended(_run(config, accepts_changes=args.accept_changes))
        return ended(_run(config))
    except REPORTED as error:
        return ended(report(error))
    except KeyboardInterrupt:
        say("stopped; the next start resumes from the newest checkpoint", sys.stderr)
        return ended(130)


def _run(config: RunConfig, *, accepts_changes: bool = False) -> int:
    with long_lived_imports():  # deferred, so that --help and configuration errors do not wait for them
        import torch

        from rlhf_triton.actor.run.policies import follow_rank_0
        from rlhf_triton.models.modeling import quiet_transformers
        from rlhf_triton.models.out_of_memory import on_rank
        from rlhf_triton.models.placement import own_device
        from rlhf_triton.training_engine.ranks import ALONE, Ranks

    torch.set_num_threads(config.actor.threads)
    torch.use_deterministic_algorithms(config.run.deterministic)
    quiet_transformers()
    if config.actor.ranks == 1:
        with on_rank(None, config.actor.policy.device, "actor.policy.token_budget"):
            return _train(config, ALONE, accepts_changes=accepts_changes)
    with (
        Ranks.joined(own_device(config.actor.policy.device)) as ranks,
        on_rank(ranks.rank, ranks.device, "actor.policy.token_budget"),
    ):
        if ranks.rank == 0:
            return _train(config, ranks, accepts_changes=accepts_changes)
        follow_rank_0(config, ranks)
    os._exit(0)  # at once: the sampling thread may still be running


def _train(config: RunConfig, ranks: AnyRanks, *, accepts_changes: bool) -> int:
    with long_lived_imports():
        from rlhf_triton.actor.loop import TrainingRun
        from rlhf_triton.actor.run.settings import describe_changes, find_changes, write_settings
        from rlhf_triton.actor.run.stopping import INTERRUPTED, STOP_GRACE_S, Stopped, stop_on_signals
        from rlhf_triton.client.client import TritonClient
        from rlhf_triton.store.run_lock import only_actor
        from rlhf_triton.wire.contract import CRITIC, REFERENCE, REWARD_MODEL

    async def ppo() -> None:
        key = os.environ.get(config.server.training_key_env or "")
        async with TritonClient(config.server_url("http"), config.actor.client, training_key=key) as client:
            if config.needs_server:
                model = REWARD_MODEL if config.serves_rewards else CRITIC if config.serves_critic else REFERENCE
                await client.describe(model)  # fails before models are loaded if no server answers
            run = TrainingRun(config, client, ranks)
            # Until here a signal raises KeyboardInterrupt; from here on it stops the run with a checkpoint.
            stop_on_signals(run.stop, STOP_GRACE_S, stop_signals())
            await run.run()

    try:
        with only_actor(config.run.dir):
            changed = find_changes(config, accepted=accepts_changes)
            for change in describe_changes(changed):
                say(f"resuming with another setting: {change}", sys.stderr)
            write_settings(config, changed)
            asyncio.run(ppo())
    except Stopped as stopped:
        say(str(stopped), sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
