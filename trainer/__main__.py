"""`python -m rlhf_triton.trainer --config YAML [section.key=value …]`: the critic sidecar of one run.

On SIGINT or SIGTERM, it writes a checkpoint and exits with code 0. After an error, it prints the error and exits with
code 2.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_triton.config.command_line import limit_access, log_to_stderr, report, run_parser
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.required_files import check_critic, check_devices
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import TrainerSection
from rlhf_triton.errors import REPORTED
from rlhf_triton.monitoring.tracing import tracing
from rlhf_triton.process import long_lived_imports, stop_event
from rlhf_triton.training_engine.launch import ended, launch_ranks, stop_signals

if TYPE_CHECKING:
    from rlhf_triton.training_engine.ranks import AnyRanks

NICENESS = 10  # so that the server takes priority on shared cores


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, follow the journal until a signal arrives, and return the exit code."""
    parser = run_parser("The critic sidecar.", prog="python -m rlhf_triton.trainer")
    parser.add_argument(
        "--init-only",
        action="store_true",
        help="make version 0 of the critic's and the reward model's weights, then exit",
    )
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        limit_access(config.run)
        log_to_stderr("sidecar", config.run, gpus=config.gpu_precisions)
        if not args.init_only or config.serves_critic:
            check_critic(config)
        if not args.init_only or config.critic.pretrain:
            check_devices(config, "trainer")
            launch_ranks(
                config.trainer.ranks, "rlhf_triton.trainer", sys.argv[1:] if argv is None else argv, key="trainer.ranks"
            )
        endpoint = None if args.init_only or os.environ.get("RANK", "0") != "0" else config.run.trace_endpoint
        with tracing("sidecar", endpoint, config.run.identity):
            _run(config, init_only=args.init_only)
    except REPORTED as error:
        return ended(report(error))
    return ended(0)


def _run(config: RunConfig, *, init_only: bool) -> None:
    _lower_priority(config.trainer)
    with long_lived_imports():  # deferred: the environment must be set first, and --help stays fast
        import torch

        from rlhf_triton.models.modeling import quiet_transformers
        from rlhf_triton.models.out_of_memory import on_rank
        from rlhf_triton.models.placement import own_device
        from rlhf_triton.trainer.critic_update import follow_rank_0
        from rlhf_triton.trainer.publish import initialise_stores
        from rlhf_triton.trainer.sidecar import run_sidecar
        from rlhf_triton.training_engine.ranks import ALONE, Ranks

    settings = config.trainer
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(config.run.deterministic)
    torch.set_num_interop_threads(1)
    quiet_transformers()
    with contextlib.ExitStack() as held:
        ranks: AnyRanks = ALONE
        number = None
        device = settings.device
        if settings.ranks > 1 and (not init_only or config.critic.pretrain):
            device = own_device(settings.device)
            ranks = held.enter_context(Ranks.joined(device))
            number = ranks.rank
        held.enter_context(on_rank(number, device, "trainer.token_budget"))  # e.g. no room for the optimizer's state
        if ranks.shards and ranks.rank:
            follow_rank_0(settings, config.run.seed, ranks, config.critic.dtype)
        elif init_only:
            initialise_stores(config, ranks)
        else:
            run_sidecar(config, stop_event(*stop_signals()), ranks)


def _lower_priority(settings: TrainerSection) -> None:
    """Limit threads and priority, so that the server's forward passes take precedence on shared cores.

    Call this before numerical libraries are imported, because they read the environment variables that it sets.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(settings.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(NICENESS)


if __name__ == "__main__":
    sys.exit(main())
