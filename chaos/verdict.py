"""The guarantees that the crash test checks, with one function for each; a verdict lists the violations."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from chaos.reference import Reference
from chaos.traffic import RequestRecord
from python_backend.store.durable import numbers_in
from python_backend.store.journal import Result
from python_backend.store.weights import Manifest, WeightsError, WeightsStore

TOLERANCE = 1e-5  # of rewards and values: the server shares forward passes among rows, the reference does not
SHOWN = 5  # violations in a printed verdict


@dataclass(frozen=True)
class Verdict:
    """Result of checking a guarantee of the system, which `promise` states."""

    promise: str
    checked: int
    """Number of items checked; 0 counts as a violation."""
    violations: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether there are no violations."""
        return not self.violations

    def sentence(self) -> str:
        """Return the guarantee, whether it was kept, and its first violations."""
        if self.kept:
            return f"kept    {self.promise} ({self.checked} checked)"
        more = f" … and {len(self.violations) - SHOWN} more" if len(self.violations) > SHOWN else ""
        return f"BROKEN  {self.promise}: {'; '.join(self.violations[:SHOWN])}{more}"


def verdict(promise: str, checked: int, violations: Sequence[str]) -> Verdict:
    """Return the verdict on a guarantee, which counts as broken if there was nothing to check."""
    return Verdict(promise, checked, list(violations) or ([] if checked else ["there was nothing to check"]))


def check_steps(record: RequestRecord, results: Mapping[int, Result], reference: Reference) -> Verdict:
    """Check that steps 1 to n were acknowledged without a gap, each with its journal result and reference loss."""
    found = [f"rejected or not answered: {refusal}" for refusal in record.refusals]
    answered = [step for step, _, _ in record.trained]
    last = len(reference.steps) - 1
    if answered != list(range(1, last + 1)):
        found.append(f"steps {_shortened(answered)} were acknowledged, steps 1 to {last} were sent")
    if sorted(results) != list(range(1, last + 1)):
        found.append(f"the journal has results of steps {_shortened(sorted(results))}, steps 1 to {last} were sent")
    for step, _, answer in record.trained:
        result, loss = results.get(step), reference.steps[step].loss if step <= last else None
        if result is None or loss is None:
            continue
        if result.error is not None:
            found.append(f"step {step} ended in an error: {result.error}")
        if result.loss_mean != loss:
            found.append(f"step {step} has loss {result.loss_mean!r}, without faults it is {loss!r}")
        told = (result.weights_version, float(np.float32(loss)))
        if (answer.weights_version, answer.loss_mean) != told:
            found.append(f"step {step} was answered with {answer}, but its result in the journal is {result}")
    return verdict("each accepted step was trained once, in order, with the loss of a run without faults", last, found)


def check_repeats(record: RequestRecord) -> Verdict:
    """Check that a step that was sent twice received the same answer twice."""
    first = {step: answer for step, _, answer in record.trained}
    found = [
        f"step {step} was answered with {first.get(step)} at first and with {answer} later"
        for step, answer in record.repeated
        if first.get(step) != answer
    ]
    return verdict("a step that was sent twice received the same answer twice", len(record.repeated), found)


def check_versions(
    manifests: Sequence[Manifest], current: int | None, reference: Reference, rewound: Collection[int] = ()
) -> Verdict:
    """Check for one version per step, in order and bit-identical to the reference; CURRENT must name the last version.

    Args:
        rewound: steps to which the run was rewound; it adds another version of its step, after those of later steps.
    """
    found = []
    steps = [manifest.step for manifest in manifests]
    last = len(reference.steps) - 1
    follow = all(step == before + 1 or (step in rewound and step <= before) for before, step in pairwise(steps))
    if not follow or steps[:1] != [0] or steps[-1] != last:
        found.append(f"the versions are of steps {_shortened(steps)}, expected 0 to {last}")
    for manifest in manifests:
        if manifest.step < len(reference.steps) and manifest.sha256 != reference.steps[manifest.step].sha256:
            found.append(
                f"version {manifest.version} of step {manifest.step} has sha256 {manifest.sha256[:12]}…, without "
                f"faults it is {reference.steps[manifest.step].sha256[:12]}…"
            )
    if manifests and current != manifests[-1].version:
        found.append(f"CURRENT names {current}, the last version is {manifests[-1].version}")
    return verdict("the weights after each step are bit-identical to a run without faults", len(manifests), found)


def check_whole(store: WeightsStore) -> Verdict:
    """Check every version's files against its manifest."""
    found = []
    folders = numbers_in(store.root)
    for version in folders:
        try:
            store.verify_files(version)
        except WeightsError as error:
            found.append(str(error))
    return verdict("the files of every version match its manifest", len(folders), found)


def check_scores(record: RequestRecord, steps: Mapping[int, int], reference: Reference) -> Verdict:
    """Check that each answer names one version and has that version's values, and that rewards never change.

    Args:
        steps: for each version, the number of critic updates that led to it.
    """
    found = []
    for served in record.served:
        if len(set(served.versions)) != 1 or served.versions[0] not in steps:
            found.append(
                f"probe {served.probe} was scored by versions {served.versions}, expected a single existing version"
            )
            continue
        expected = reference.steps[steps[served.versions[0]]].values[served.probe]
        what = f"of probe {served.probe} by version {served.versions[0]}"
        found += _differences(f"values {what}", served.values, expected)
        found += _differences(f"rewards {what}", served.rewards, reference.rewards[served.probe])
    return verdict("no reward or value was wrong", record.served.total(), found)


def check_checkpoint(last: Path, reference: Reference) -> Verdict:
    """Check that weights and optimizer of the last checkpoint are bit-identical to the reference's."""
    import torch
    from safetensors.torch import load_file

    found, checked = [], 0
    for path in sorted(reference.checkpoint.glob("*.safetensors")):
        if not (last / path.name).is_file():
            found.append(f"{last.name}/{path.name} is missing")
            continue
        ours, theirs = load_file(last / path.name), load_file(path)
        checked += len(theirs)
        found += [f"{path.name}: {name} is in only one of the two" for name in sorted(set(ours) ^ set(theirs))]
        different = [name for name in sorted(set(ours) & set(theirs)) if not torch.equal(ours[name], theirs[name])]
        found += [f"{path.name}: {name} differs" for name in different]
    return verdict("the last checkpoint, optimizer included, is that of a run without faults", checked, found)


def check_freshness(record: RequestRecord) -> Verdict:
    """Check that no row was scored by a version older than one that the server had reported as served."""
    found = [
        f"at {when:.1f} s a row was scored by version {version}, after version {promised} had been reported as served"
        for when, version, promised in record.stale
    ]
    return verdict("once a step is acknowledged, no older version scores", record.served.total(), found)


def check_order(leftovers: Sequence[str], troubles: Sequence[str]) -> Verdict:
    """Check that no processes, shared memory or unfinished folders remain, and that only killed processes ended."""
    return verdict(
        "no processes, shared memory or unfinished folders remain, and only killed processes ended",
        1,
        [*leftovers, *troubles],
    )


def check_coverage(kills: Sequence[Mapping[str, object]], planned: Sequence[tuple[str, str]]) -> Verdict:
    """Check that every process and every kill point of the plan was hit; a kill counts if its point was observed."""
    hits = [kill for kill in kills if kill["hit"]]
    wanted = [("victim", {victim for victim, _ in planned}), ("point", {point for _, point in planned})]
    found = [
        f"no kill hit the {key} {name!r}"
        for key, names in wanted
        for name in sorted(names - {str(kill[key]) for kill in hits})
    ]
    return verdict("each victim and each kill point was hit", len(hits), found)


def _differences(what: str, got: bytes, expected: np.ndarray) -> list[str]:
    array = np.frombuffer(got, np.float32)
    if array.size != expected.size:
        return [f"{what}: {array.size} numbers, not {expected.size}"]
    largest = float(np.abs(array - expected.ravel()).max())
    return [] if largest <= TOLERANCE else [f"{what}: off by {largest:.2g}"]  # NaN counts as off, too


def _shortened(steps: Sequence[int]) -> str:
    """Return step numbers as text, with runs as `1-5`."""
    text = ""
    for i, step in enumerate(steps):
        if i and step == steps[i - 1] + 1:
            text = re.sub(r"(-\d+)?$", f"-{step}", text, count=1)
        else:
            text += f"{', ' if text else ''}{step}"
    return text or "none"
