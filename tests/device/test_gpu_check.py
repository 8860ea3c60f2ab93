"""The check of a GPU on simulated cards: nothing meets on two devices."""

from collections.abc import Iterator

import pytest

from benchmarks import gpu as parts


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
