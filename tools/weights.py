"""`rlhf-triton weights list | verify | publish | rollback | ready`: the versions of critic and reward model."""

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.inspection import check_checkpoint
from rlhf_triton.config.command_line import add_run_arguments, reporting
from rlhf_triton.config.live_models import LIVE_MODELS, LiveModel, live_model, live_models
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.digests import brief
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.weights import MANIFEST_FILE, WeightsError, WeightsStore
from rlhf_triton.tools.arguments import parse

PATIENCE_S = 60.0  # how long to wait until all instances serve the rolled-back version


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Run the action; return 0, 1 if a version is bad or not served, 2 after an error."""
    args = parse(_parser(), argv)
    config = load_config(args.config, args.overrides)
    if args.model == "reward" and not config.reward.store:
        raise ConfigError("reward.store is false, so the reward model has no versions; set it to true")
    served = [live.name for live in live_models(config)]
    if not served or (args.model == "critic" and not config.serves_critic):
        raise ConfigError(
            "no versions are served: the configuration has no critic, and reward.store is false"
            f"; http://{config.server_url('http')}/v2/health/ready tells whether its server is ready"
        )
    model = live_model(config, args.model or served[0])
    store = WeightsStore(model.store)
    if store.current() is None and not store.versions():
        raise WeightsError(f"the weights store {store.root} is empty; `rlhf-triton serve` creates version 0")
    if args.action in ("verify", "rollback", "publish"):  # which load models
        from rlhf_triton.models.modeling import quiet_transformers

        quiet_transformers()
    match args.action:
        case "list":
            show(store)
        case "verify":
            return verify(config, model, store, args.version or store.versions())
        case "rollback":
            rollback(config, model, store, args.to)
        case "publish":
            publish(config, model, store, args.path)
        case "ready":
            return ready(model, store, args.server or config.server_url("grpc"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Manage the weights versions of a model.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    for name, what in (
        ("list", "list every version with its parent and the instances that serve it"),
        ("verify", "verify each version: files, hash, finite values, a forward pass"),
        ("publish", "verify a checkpoint and serve it as a new version: only with --model reward"),
        ("rollback", "publish the weights of an older version again, as a new version"),
        ("ready", "exit with 0 if the server serves CURRENT or a later version, else 1: for readiness probes"),
    ):
        action = actions.add_parser(name, help=what, description=what)
        if name == "publish":  # first, because all later positional arguments are overrides
            action.add_argument("path", type=Path, help="Hugging Face model folder")
        add_run_arguments(action).add_argument(
            "--model", choices=LIVE_MODELS, help="default: the critic if it is served"
        )
        if name == "verify":
            action.add_argument("--version", type=int, action="append", help="only this version; may be repeated")
        if name == "rollback":
            action.add_argument("--to", type=int, help="the older version; default: the parent of CURRENT")
        if name == "ready":
            action.add_argument("--server", help="host:port of the server's gRPC; default: as in the YAML")
    return parser


def show(store: WeightsStore) -> None:
    """Print a line for each version, then a line for each instance that rejected a version."""
    current = store.current()
    records = store.records.alive()
    sources = [version.source or "" for version in store.manifests()]
    width = max(map(len, ["source", *sources]))
    print(
        f"{'version':>8}  {'step':>6}  {'from':>6}  {'source':<{width}}  {'MB':>8}  {'digest':<18}  {'written':<19}  "
        "served by"
    )
    for version in store.versions():
        folder = store.folder(version)
        try:
            manifest = store.manifest(version)
        except WeightsError as error:
            print(f"{version:>8}  {error}")
            continue
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((folder / MANIFEST_FILE).stat().st_mtime))
        serving = [
            record.name if store.records.last_sign(record) is None else f"{record.name} (silent)"
            for record in records
            if record.version == version
        ]
        marks = ["CURRENT", *serving] if version == current else serving
        parent = "-" if manifest.parent is None else str(manifest.parent)
        print(
            f"{version:>8}  {manifest.step:>6}  {parent:>6}  {manifest.source or '-':<{width}}  {size:>8.1f}  "
            f"{brief(manifest.digest):<18}  {written}  {', '.join(marks)}".rstrip()
        )
    for record in records:
        if record.rejected is not None:
            print(f"{record.name} rejected version {record.rejected}: {record.error}")
    if not records:
        print("no serving instance is alive")


def verify(config: RunConfig, model: LiveModel, store: WeightsStore, versions: Sequence[int]) -> int:
    """Verify all `versions`, continuing after a bad one; return 1 if any is bad, else 0."""
    from rlhf_triton.trainer.verification import verify_alone  # deferred: imports torch

    bad = 0
    for version in versions:
        try:
            manifest = verify_alone(store, version, _loader(config, model))
            print(f"version {version}: good, {len(manifest.files)} files, step {manifest.step}", flush=True)
        except WeightsError as error:
            bad += 1
            print(f"{error}", flush=True)
    if bad:
        print(f"error: {bad} of {len(versions)} versions cannot be served", file=sys.stderr)
    return 1 if bad else 0


def rollback(config: RunConfig, model: LiveModel, store: WeightsStore, to: int | None) -> None:
    """Publish the weights of version `to` as a new version and wait until every instance serves it.

    Raises:
        WeightsError: version `to` does not exist or is damaged.
        RlhfError: some instance does not serve the new version in time, although CURRENT names it.
    """
    from rlhf_triton.trainer.publish import Publication, Publisher
    from rlhf_triton.trainer.verification import verify_alone, verify_copy

    current = store.current()
    load = _loader(config, model)
    newest = None if current is None else store.manifest(current)
    target = newest.parent if to is None and newest is not None else to
    if target is None:
        raise WeightsError(f"version {current} has no parent; name a version with --to")

    def write(folder: Path) -> None:
        apart = shutil.ignore_patterns(MANIFEST_FILE)
        # Not their mode, too: the files of a version are read-only, their copies are not yet.
        shutil.copytree(store.folder(target), folder, ignore=apart, copy_function=shutil.copyfile, dirs_exist_ok=True)

    manifest = verify_alone(store, target, load)
    epoch = 0 if newest is None else newest.epoch
    publisher = Publisher(config, store, run_id=manifest.run_id, epoch=epoch, model=model)
    verify = functools.partial(verify_copy, model=load(store.folder(target)))
    publication = Publication(write=write, verify=verify, step=manifest.step, parent=target)
    published = publisher.publish(publication, _heartbeat(store))
    print(f"version {published.version} is served, with the weights of version {target} (step {manifest.step})")
    if model.name == "critic" and Journal(config.run.journal_dir, config.run.identity).is_followed():
        print(
            "a sidecar is training this critic, and its next update will replace this version; to continue training "
            f"from this version, resume the actor from step {manifest.step}, which rewinds the critic"
        )


def publish(config: RunConfig, model: LiveModel, store: WeightsStore, checkpoint: Path) -> None:
    """Verify a checkpoint and serve it as a new version of the reward model, once every instance has loaded it.

    Raises:
        RlhfError: the checkpoint was refused, and the old version serves; or RlhfError, as in `rollback`.
    """
    from rlhf_triton.trainer.reward_publishing import publish_reward

    if model.name != "reward":
        raise WeightsError("only the sidecar publishes versions of the critic; give --model reward")
    check_checkpoint(checkpoint)
    published = publish_reward(config, checkpoint, on_wait=_heartbeat(store))
    print(f"version {published.version} is served, with the weights of {checkpoint}")


def ready(model: LiveModel, store: WeightsStore, url: str) -> int:
    """Return 0 if the server at `url` serves CURRENT or a later version, else 1."""
    from rlhf_triton.client.model_servers import ModelServers

    current = store.current()
    outcome = ModelServers([url], model=model.served_as).versions()[0]
    if outcome.version is not None and current is not None and outcome.version >= current:
        print(f"ready: {url} serves version {outcome.version}")
        return 0
    what = outcome.error if outcome.version is None else f"{url} serves version {outcome.version}"
    print(f"not ready: {what}; CURRENT is {current}")
    return 1


def _heartbeat(store: WeightsStore) -> Callable[[str], None]:
    """Return the publisher's heartbeat callback.

    It raises RlhfError if no instance is alive, or PATIENCE_S after its first call: the checks before may take any
    time.
    """
    deadline: float | None = None

    def on_wait(state: str) -> None:
        nonlocal deadline
        deadline = deadline or time.monotonic() + PATIENCE_S
        if not store.records.alive() and not store.records.died():  # a supervisor replaces an instance that died
            raise RlhfError(
                f"CURRENT is now {store.current()}, but no serving instance is alive; `rlhf-triton serve` serves it"
            )
        if time.monotonic() > deadline:
            raise RlhfError(
                f"still {state} after {PATIENCE_S:g} s; `rlhf-triton weights list` "
                "shows which version each instance serves"
            )

    return on_wait


def _loader(config: RunConfig, model: LiveModel) -> Callable[[Path], Any]:
    from rlhf_triton.models.modeling import load_critic
    from rlhf_triton.trainer.publish import reward_loader

    return load_critic if model.name == "critic" else reward_loader(config.reward)
