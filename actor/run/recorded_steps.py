"""Finds the steps in a run's journal of samples. Imports no torch.

    <run.dir>/samples/    a log (see `record_log`) of openings, groups and steps

With `actor.max_off_policy_steps`, groups are also recorded as soon as they are sampled, before they are scored. A
resumed run takes those that no step has trained on, if the policy of the checkpoint, or an older one, sampled them.

An opening has the settings and the environment of the records after it, the fingerprints of the policy's start and of
the prompt files, the last checkpoint's step, the number of the first group after it, and the step after which its
process resumed: what earlier processes have of later steps is void.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_triton.errors import RlhfError
from rlhf_triton.store.record_log import Place, StoredRecord, openings_of, read_records, record_at

GROUP = "group"
STEP = "step"
SAMPLED = "sampled"
KEPT = "advantages"  # the batch's tensor whose values are in the record of a step, besides its digests
OLD_LOGPROBS = "old_logprobs"  # as many values, if the update recomputed them: see `PolicyUpdate`
SAMPLING = (
    ("settings", "actor", "generation"),
    ("settings", "actor", "prompts"),
    ("settings", "actor", "algorithm", "responses_per_prompt"),
    ("settings", "environment"),
    ("sources",),
)
"""Entries of an opening that decide how responses are sampled."""


def samples_of(run_dir: Path) -> Path:
    """Return the folder of a run's journal of samples."""
    return run_dir / "samples"


def first_segment(openings: Mapping[int, Mapping[str, Any]], step: int) -> int:
    """Return the first segment with records after `step` that are not void; 0 if all segments are needed."""
    marks = {number: (opening["session"], opening["step"]) for number, opening in openings.items()}
    newest = max((number for number, (_, start) in marks.items() if start <= step), default=0)
    return min((number for number, mark in marks.items() if mark == marks.get(newest)), default=0)


def describe_samples(folder: Path, step: int) -> str:
    """Return how many groups are kept, and of which steps, for a run after `step`."""
    openings = openings_of(folder)
    if not openings:
        return "none are kept"
    first = openings[min(openings)]
    end = first["first"]
    for segment in sorted(openings, reverse=True):  # the newest may have no groups yet
        headers = [record.header for _, record in read_records(folder, segment)]
        numbers = [header["number"] for header in headers if header["kind"] == GROUP]
        if numbers:
            end = max(numbers) + 1
            break
    oldest = first["step"] + 1
    steps = f"steps {oldest} to {step}" if oldest < step else f"step {oldest}"
    num_groups = end - first["first"]
    return f"{num_groups} groups, each a prompt with its responses, of {steps}; `rlhf-triton replay` reads them"


@dataclass
class RecordedSteps:
    """The complete steps of a range, and where they and their groups are."""

    openings: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by step
    steps: dict[int, Place] = field(default_factory=dict)
    groups: dict[tuple[int, int], Place] = field(default_factory=dict)  # by step and number
    damage: list[RlhfError] = field(default_factory=list)  # what was skipped, and may be why a step is missing

    def step(self, step: int) -> StoredRecord:
        """Return the record of a step."""
        return record_at(self.steps[step])

    def group(self, step: int, number: int) -> StoredRecord:
        """Return the record of a group."""
        return record_at(self.groups[step, number])


def find_steps(folder: Path, first: int, last: int) -> RecordedSteps:
    """Find the steps from `first` to `last` whose records are complete; skip damaged records and foreign segments."""
    found, numbers = RecordedSteps(), dict[int, list[int]]()
    openings = openings_of(folder, found.damage.append)
    start = first_segment(openings, first - 1)
    for number, opening in openings.items():
        later = [other["resumed"] for other in openings.values() if other["session"] > opening["session"]]
        for place, record in read_records(folder, number, found.damage.append) if number >= start else ():
            step = record.header["step"]
            if record.header["kind"] in ("opening", SAMPLED) or not first <= step <= min([last, *later]):
                continue
            if record.header["kind"] == STEP:
                found.steps[step], found.openings[step] = place, opening
                numbers[step] = record.header["groups"]
            else:
                found.groups[step, record.header["number"]] = place
    for step, groups in numbers.items():
        if any((step, group) not in found.groups for group in groups):
            del found.steps[step]
    return found


def find_sampled(folder: Path, step: int, *, first: int, ahead: int, opening: Mapping[str, Any]) -> list[StoredRecord]:
    """Return the groups that were sampled for steps after the checkpoint of `step`, as a run with this opening would.

    Args:
        first: number of the first group that is not trained.
        ahead: `actor.max_off_policy_steps`.
    """
    found, openings = dict[int, StoredRecord](), openings_of(folder)
    start = first_segment(openings, step - ahead)
    for segment, earlier in openings.items():
        if segment < start or any(_entry(earlier, path) != _entry(opening, path) for path in SAMPLING):
            continue
        later = [other["resumed"] for other in openings.values() if other["session"] > earlier["session"]]
        for _, record in read_records(folder, segment):
            header = record.header
            is_needed = header["kind"] == SAMPLED and header["number"] >= first and "versions" in record.arrays
            if is_needed and int(record.arrays["versions"].max()) <= min([step, *later]):
                found[header["number"]] = record
    return [*found.values()]


def _entry(opening: Any, path: Sequence[str]) -> Any:
    for name in path:
        opening = opening[name]
    return opening
