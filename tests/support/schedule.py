"""Distributes test files over the processes of `pytest -n`: those that share servers, or ranks, run in one process.

A session fixture exists once in each process, and starting a server of two models takes longer than most tests; so does
the process of which ranks are forked.
"""

import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHARED = {
    "servers": r"^(async )?def test_\w+\([^)]*\blive\b",
    "ranks": r"^from ranks import\b",
}


@pytest.hookimpl(optionalhook=True)  # known only with pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByFileAndServer(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid.partition("::")[0])

    return ByFileAndServer(config, log)


@functools.cache
def scope_of(file):
    """Return the name of what runs in one process: the file itself, or the files that share something."""
    text = (TESTS.parent / file).read_text()
    return next((name for name, pattern in SHARED.items() if re.search(pattern, text, re.MULTILINE)), file)
