"""`python -m tools weights list | verify | rollback | ready`: the critic's versions, for operators."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from python_backend.config import RunConfig, load_config
from python_backend.config.command_line import add_run_arguments, report
from python_backend.errors import REPORTED, RlhfError
from python_backend.store.journal import Journal
from python_backend.store.weights import MANIFEST_FILE, Manifest, WeightsError, WeightsStore

PATIENCE_S = 60.0  # how long to wait until all instances serve the rolled-back version


class NotServed(RlhfError):
    """Some instance does not serve the version that CURRENT names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the action and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        store = WeightsStore(config.run.weights_dir)
        if store.current() is None and not store.versions():
            raise WeightsError(f"the weights store {store.root} is empty; `python -m tools serve` creates version 0")
        match args.action:
            case "list":
                show(store)
            case "verify":
                return verify(store, args.version or store.versions())
            case "rollback":
                rollback(config, store, args.to)
            case "ready":
                return ready(store, args.server or config.server.grpc_url)
    except REPORTED as error:
        return report(error, 1)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools weights", description="Manage the critic's versions.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for name, what in (
        ("list", "list every version with its parent and the instances that serve it"),
        ("verify", "verify each version: files, hash, finite values, a forward pass"),
        ("rollback", "publish the weights of an older version again, as a new version"),
        ("ready", "exit with 0 if the server serves CURRENT or a later version, else 1: for readiness probes"),
    ):
        action = add_run_arguments(actions.add_parser(name, help=what, description=what))
        if name == "verify":
            action.add_argument("--version", type=int, action="append", help="only this version; may be repeated")
        if name == "rollback":
            action.add_argument("--to", type=int, help="the older version; default: the parent of CURRENT")
        if name == "ready":
            action.add_argument("--server", help="host:port of the server's gRPC; default: as in the YAML")
    return parser


def show(store: WeightsStore) -> None:
    """Print a line for each version, then a line for each instance that rejected a version."""
    current, records = store.current(), store.records.alive()
    print(f"{'version':>8}  {'step':>6}  {'from':>6}  {'MB':>8}  {'sha256':<12}  {'written':<19}  served by")
    for version in store.versions():
        folder = store.folder(version)
        try:
            manifest = store.manifest(version)
        except WeightsError as error:
            print(f"{version:>8}  {error}")
            continue
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((folder / MANIFEST_FILE).stat().st_mtime))
        serving = [record.name for record in records if record.version == version]
        marks = ["CURRENT"] * (version == current) + serving
        parent = "-" if manifest.parent is None else str(manifest.parent)
        print(
            f"{version:>8}  {manifest.step:>6}  {parent:>6}  {size:>8.1f}  {manifest.sha256[:12]}  {written}  "
            f"{', '.join(marks)}".rstrip()
        )
    for record in records:
        if record.rejected is not None:
            print(f"{record.name} rejected version {record.rejected}: {record.error}")
    if not records:
        print("no serving instance is alive")


def verify(store: WeightsStore, versions: Sequence[int]) -> int:
    """Verify all `versions`, continuing after a bad one; return 1 if any is bad, else 0."""
    from python_backend.models.modeling import quiet_transformers  # deferred: they import torch
    from trainer.verification import VersionRejected, verify_alone

    quiet_transformers()
    bad = 0
    for version in versions:
        try:
            manifest = verify_alone(store, version)
            print(f"version {version}: good, {len(manifest.tensors)} tensors, step {manifest.step}", flush=True)
        except VersionRejected as error:
            bad += 1
            print(f"{error}", flush=True)
    if bad:
        print(f"error: {bad} of {len(versions)} versions cannot be served", file=sys.stderr)
    return 1 if bad else 0


def rollback(config: RunConfig, store: WeightsStore, to: int | None) -> None:
    """Publish the weights of version `to` as a new version and wait until every instance serves it.

    Raises:
        WeightsError: version `to` does not exist or is damaged.
        NotServed: some instance does not serve the new version in time, although CURRENT names it.
    """
    from python_backend.models.modeling import load_critic, quiet_transformers
    from trainer.publish import Publisher
    from trainer.verification import VersionRejected, verify_alone

    quiet_transformers()
    target = _parent_of_current(store) if to is None else to
    try:
        manifest = verify_alone(store, target)
        publisher = Publisher.of(config, store, run_id=manifest.run_id, epoch=_epoch(store))
        reload = publisher.publish(
            load_critic(store.folder(target)), step=manifest.step, parent=target, beat=_Patience(store),
            write=lambda folder: _copy(store.folder(target), folder),
        )  # fmt: skip
    except VersionRejected as error:
        raise WeightsError(str(error)) from error
    print(f"version {reload.version} is served, with the weights of version {target} (step {manifest.step})")
    if Journal(config.run.journal_dir, config.run.identity).is_followed():
        print(
            "a sidecar is training this critic, and its next update will replace this version; to continue training "
            f"from this version, resume the actor from step {manifest.step}, which rewinds the critic"
        )


def ready(store: WeightsStore, url: str) -> int:
    """Return 0 if the server at `url` serves CURRENT or a later version, else 1."""
    from trainer.servers import CriticServers

    current = store.current()
    outcome = CriticServers([url]).versions()[0]
    if outcome.version is not None and current is not None and outcome.version >= current:
        print(f"ready: {url} serves version {outcome.version}")
        return 0
    what = outcome.error if outcome.version is None else f"{url} serves version {outcome.version}"
    print(f"not ready: {what}; CURRENT is {current}")
    return 1


class _Patience:
    """Heartbeat callback of the publisher; raises NotServed if no instance is alive or PATIENCE_S have passed."""

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self._deadline = time.monotonic() + PATIENCE_S

    def __call__(self, state: str) -> None:
        if not self._store.records.alive():
            raise NotServed(f"CURRENT is now {self._store.current()}, but no serving instance is alive")
        if time.monotonic() > self._deadline:
            raise NotServed(
                f"still {state} after {PATIENCE_S:g} s; `python -m tools weights list` "
                "shows which version each instance serves"
            )


def _parent_of_current(store: WeightsStore) -> int:
    current = store.current()
    parent = None if current is None else store.manifest(current).parent
    if parent is None:
        raise WeightsError(f"version {current} has no parent; name a version with --to")
    return parent


def _epoch(store: WeightsStore) -> int:
    current = store.current()
    manifest: Manifest | None = None if current is None else store.manifest(current)
    return 0 if manifest is None else manifest.epoch


def _copy(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        if path.name != MANIFEST_FILE:
            shutil.copyfile(path, folder / path.name)
