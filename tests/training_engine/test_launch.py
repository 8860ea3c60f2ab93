"""Launching ranks: the messages between a rank and its agent, and the number of processes."""

import os
import signal
from unittest import mock

import pytest

from rlhf_triton import process
from rlhf_triton.errors import RlhfError
from rlhf_triton.training_engine import launch
from rlhf_triton.training_engine.launch import AGENT, FOLDER, AgentFolder, ended, launch_ranks, stop_signals


def test_launch_ranks_stays_in_the_process_for_a_single_rank(monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("launched"))
    launch_ranks(1, "rlhf_triton.trainer", [], key="trainer.ranks")
    assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
    assert ended(2) == 2


def test_launch_ranks_replaces_the_process_with_an_agent_for_several_ranks(monkeypatch):
    called = []
    monkeypatch.setattr(os, "execv", lambda path, command: called.append(command[1:]))
    launch_ranks(2, "rlhf_triton.trainer", ["--config", "x.yaml"], key="trainer.ranks")
    assert called == [
        [process.RUN_MODULE, "rlhf_triton.training_engine.agent", "2", "rlhf_triton.trainer", "--config", "x.yaml"]
    ]


@pytest.mark.parametrize("parent", [1, 7])
def test_a_rank_ends_if_its_agent_has_ended(tmp_path, monkeypatch, parent):
    """The agent may also be process 1 of a container."""
    monkeypatch.setattr(process.ctypes, "CDLL", mock.Mock())
    monkeypatch.setattr(process.os, "getppid", lambda: parent)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", FOLDER: str(tmp_path), AGENT: str(parent)}.items():
        monkeypatch.setenv(name, value)
    launch_ranks(2, "rlhf_triton.trainer", [], key="trainer.ranks")
    monkeypatch.setenv(AGENT, "8")
    with pytest.raises(SystemExit):
        launch_ranks(2, "rlhf_triton.trainer", [], key="trainer.ranks")


def test_launch_ranks_refuses_another_world_size(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RlhfError, match=r"trainer\.ranks is 2, but the launcher started 3 processes; make them equal"):
        launch_ranks(2, "rlhf_triton.trainer", [], key="trainer.ranks")


def test_stop_reaches_running_ranks_and_ranks_that_start_later(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert stop_signals() == (signal.SIGINT,)
    sent = []
    monkeypatch.setattr(launch.os, "kill", lambda *arguments: sent.append(arguments))
    folder = AgentFolder(tmp_path)
    assert (folder.enter(), folder.exit_code()) == (True, None)
    folder.stop()
    assert sent == [(os.getpid(), signal.SIGINT)]
    assert (folder.enter(), folder.exit_code()) == (False, 0)
    assert ended(2) == 2
    folder.stop()
    assert folder.exit_code() == 2
