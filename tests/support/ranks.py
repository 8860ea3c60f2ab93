"""Runs a function on several ranks, each a process of its own, joined over gloo on loopback."""

import contextlib
import faulthandler
import multiprocessing
import os
from datetime import timedelta

import torch

from rlhf_triton.models.sharded_tensors import whole
from rlhf_triton.python_backend.serving.ranks.controller import ServingRanks
from rlhf_triton.tools.server.ports import free_port

TIMEOUT_S = 900  # several models, one after the other
# Ranks are forked from one process that has imported what takes seconds, once for all tests. It has run no code of
# torch's, so that it has no threads of torch's, which a fork would lose.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rlhf_triton.trainer.critic_update", "rlhf_triton.actor.run.policies"])


@contextlib.contextmanager
def serving_ranks(device):
    """Yield two ranks of served models; this process is rank 0. None may be lost."""
    lost = []
    ranks = ServingRanks(2, device, 1, lost.append)
    yield ranks
    ranks.close()
    torch.distributed.destroy_process_group()
    assert not lost


def whole_tensors(tensors):
    """Yield each tensor whole, on the CPU, one at a time; collective. All ranks must consume it in the same order."""
    for name, tensor in tensors.items():
        yield name, whole(tensor.detach()).cpu()


def on_ranks(
    size,
    work,
    *arguments,
    device="cpu",
    group_timeout_s=120,
):
    """Return `work(ranks, *arguments)` of each rank; `work` is a function of a module, so that a process can import it.

    `device` is that of the role: each rank has its own.

    Raises:
        RuntimeError: ranks failed; the message names each with its error.
    """
    port = free_port()
    started = []
    for rank in range(size):
        mine, theirs = CONTEXT.Pipe()
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        process = CONTEXT.Process(target=_rank, args=(theirs, environment, device, group_timeout_s, work, arguments))
        process.start()
        theirs.close()
        started.append((process, mine))
    try:
        outcomes = [_outcome(process, connection) for process, connection in started]
    finally:
        for process, connection in started:
            connection.close()
            process.join(timeout=120)
            process.kill()
    if errors := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error is not None]:
        raise RuntimeError("; ".join(errors))
    return [result for result, _ in outcomes]


def _outcome(process, connection):
    """Return the result of a rank, and its error if it has none."""
    if not connection.poll(TIMEOUT_S):
        return None, f"no result within {TIMEOUT_S} s"
    try:
        return connection.recv()
    except EOFError:
        process.join(timeout=120)
        return None, f"died with exit code {process.exitcode}"


def _rank(
    connection,
    environment,
    device,
    group_timeout_s,
    work,
    arguments,
):
    faulthandler.enable()  # a rank that a signal ends says where
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    import torch

    from rlhf_triton.models.placement import own_device
    from rlhf_triton.training_engine.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks.join(own_device(device), timeout=timedelta(seconds=group_timeout_s))
    try:
        connection.send((work(ranks, *arguments), None))
    except Exception as error:  # process edge: the test shows it
        connection.send((None, f"{type(error).__name__}: {error}"))
        raise
    ranks.close()
