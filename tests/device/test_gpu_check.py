"""The parts of the check of a real card, on the simulated one (simulated_cuda): nothing meets on two devices.

They run in this process, with tiny models; tests/benchmarks/test_bench_gpu.py has the command, and a process for each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import memory
from benchmarks.gpu import parts


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parts.Job]:
    """All parts share its checkpoints; `device_tests` starts pytest and runs no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "IN_FLIGHT", 16)
        yield parts.Job("cuda", small=True, scratch=str(tmp_path_factory.mktemp("scratch")), tests="--version")


@pytest.mark.parametrize(
    "part", ["environment", "device_tests", "served_score", "scoring", "swap", "ppo_step", "mixed_requests"]
)
def test_a_part_of_the_check_finds_no_number_outside_its_limits(job: parts.Job, part: str):
    """Without `tritonserver`: a real server sees that there is no GPU."""
    found = list(getattr(parts, part)(job))
    assert found
    assert [number for number in found if number.verdict == "miss"] == []


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_role_whose_memory_the_planner_predicts_works_on_the_card(job: parts.Job, role: str):
    config, before = job.config(), memory.reset_peak("cuda")
    memory.run_role(role, config)
    assert memory.peak_bytes("cuda") > before
    assert memory.planned_bytes(role, config) > 0
