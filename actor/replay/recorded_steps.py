"""Finds the steps in a run's journal of samples. Imports no torch.

    <run.dir>/sample_journal/    a log (see `record_log`) of groups and steps

The record of a step has the run's settings and environment. With `actor.max_off_policy_steps`, groups are also
recorded as soon as they are sampled, before they are scored. A resumed run takes those that no step has trained on, if
the policy of the checkpoint, or an older one, sampled them.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import numbers_in
from rlhf_triton.store.record_log import RecordPlace, StoredRecord, read_records, record_at

GROUP = "group"
STEP = "step"
SAMPLED = "sampled"
STORED_TENSOR = "advantages"  # the batch's tensor whose values are in the record of a step, besides its digests
OLD_LOGPROBS = "old_logprobs"  # as many values, if the update recomputed them: see `PolicyUpdate`


def describe_samples(folder: Path, step: int, *, ahead: int) -> str:
    """Return how many groups are kept, and of which steps, for a run after `step`; `ahead`: as in `find_sampled`."""
    steps = [number for number in numbers_in(folder) if 0 < number <= step]
    headers = [record.header for number in steps[:1] + steps[-1:] for _, record in read_records(folder, number)]
    numbers = [header["number"] for header in headers if header["kind"] == GROUP]
    text = "none are kept"
    if numbers:
        spans = f"steps {steps[0]} to {step}" if steps[0] < step else f"step {step}"
        num_groups = max(numbers) + 1 - min(numbers)
        text = f"{num_groups} groups, each a prompt with its responses, of {spans}; `rlhf-triton replay` reads them"
    if not ahead:
        return text
    groups = find_sampled(folder, step, first=max(numbers, default=-1) + 1, ahead=ahead)
    policy_steps = [each for _, record in groups for each in record.arrays["versions"].tolist() if each >= 0]
    lag = f", policy lag {step - min(policy_steps)}" if policy_steps else ""
    return f"{text}; sampled ahead: {len(groups)} groups{lag}"


@dataclass
class RecordedSteps:
    """The complete steps of a range, and where they and their groups are."""

    steps: dict[int, RecordPlace] = field(default_factory=dict)
    groups: dict[tuple[int, int], RecordPlace] = field(default_factory=dict)  # by step and number
    damage: list[RlhfError] = field(default_factory=list)  # what was skipped, and may be why a step is missing

    def step(self, step: int) -> StoredRecord:
        """Return the record of a step."""
        return record_at(self.steps[step])

    def group(self, step: int, number: int) -> StoredRecord:
        """Return the record of a group."""
        return record_at(self.groups[step, number])


def find_steps(folder: Path, first: int, last: int) -> RecordedSteps:
    """Find the steps from `first` to `last` whose records are complete; skip damaged records and foreign files."""
    recorded = RecordedSteps()
    for step in numbers_in(folder):
        if not first <= step <= last:
            continue
        numbers = list[int]()
        for place, record in read_records(folder, step, recorded.damage.append):
            if record.header["kind"] == STEP:
                recorded.steps[step] = place
                numbers = record.header["groups"]
            elif record.header["kind"] == GROUP:
                recorded.groups[step, record.header["number"]] = place
        if any((step, number) not in recorded.groups for number in numbers):
            del recorded.steps[step]
    return recorded


def find_sampled(
    folder: Path, step: int, *, first: int, ahead: int, sampling: str | None = None
) -> list[tuple[int, StoredRecord]]:
    """Return the groups that were sampled for steps after `step`, each after its folder's number.

    Args:
        first: number of the first group that is not trained.
        ahead: `actor.max_off_policy_steps`.
        sampling: digest of what decides how responses are sampled; None: any.
    """
    groups = dict[int, tuple[int, StoredRecord]]()
    for number in numbers_in(folder):
        for _, record in read_records(folder, number) if number >= step - ahead else ():
            header = record.header
            is_needed = (
                header["kind"] == SAMPLED and header["number"] >= first and sampling in (None, header["sampling"])
            )
            if is_needed and "versions" in record.arrays and int(record.arrays["versions"].max()) <= step:
                groups[header["number"]] = (number, record)
    return [*groups.values()]
