"""One rank of `benchmarks.publish`, which starts it through the agent."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.usage import peak_rss_bytes, reset_peak_rss, timed
from python_backend.models.modeling import load_critic, quiet_transformers
from python_backend.parallel.launch import ended, launch_ranks
from python_backend.parallel.ranks import Ranks
from python_backend.store.durable import sync_file
from python_backend.store.weights import WeightsStore, sha256_of
from trainer.sharded.critic import ShardedCritic, critic_operations


def main() -> int:
    """Publish as often as the arguments say; rank 0 writes samples.json."""
    folder, repeats = Path(sys.argv[1]), int(sys.argv[2])
    launch_ranks(int(os.environ["WORLD_SIZE"]), "benchmarks.publish_ranks", sys.argv[1:], key="--ranks")
    quiet_transformers()
    torch.set_num_threads(1)
    with Ranks.joined("cpu") as ranks:
        critic = ShardedCritic(load_critic(folder / "critic"), ranks, "float32")
        memory = Memory(ranks)
        if ranks.rank:
            ranks.operations.follow(
                {
                    **critic_operations(lambda: critic),
                    "reset": memory.reset,
                    "extra": memory.extra,
                }
            )
        else:
            samples = [_sample(critic, memory, folder) for _ in range(repeats + 1)]  # the first one is a warm-up
            (folder / "samples.json").write_text(json.dumps(samples[1:]))
    return ended(0)


class Memory:
    """Peak of the resident memory of each rank above its value at the last reset, in bytes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._start = ranks, 0

    def reset(self) -> None:
        """Reset the peak on every rank."""
        self._ranks.announce("reset")
        reset_peak_rss()
        self._start = peak_rss_bytes()
        self._ranks.gather(None)

    def extra(self) -> list[int]:
        """Return the bytes of each rank."""
        self._ranks.announce("extra")
        return self._ranks.gather(peak_rss_bytes() - self._start)


def _sample(critic: ShardedCritic, memory: Memory, folder: Path) -> dict[str, Any]:
    store = WeightsStore(folder / "store")
    memory.reset()
    write_s, manifest = timed(
        lambda: store.add(critic.write, run_id="bench", step=0, parent=None, epoch=0, reuse=False)
    )
    verify_s, _ = timed(lambda: critic.verify(store, manifest.version))
    extra = memory.extra()
    paths = sorted(store.folder(manifest.version).glob("*.safetensors"))
    data = [path.read_bytes() for path in paths]
    shutil.rmtree(store.folder(manifest.version))
    plain_s, _ = timed(lambda: _write_and_hash(data, folder / "plain"))
    return {
        "bytes": sum(map(len, data)),
        "publish_s": write_s + verify_s,
        "write_s": write_s,
        "plain_s": plain_s,
        "extra_bytes": extra,
        "files": manifest.files,
    }


def _write_and_hash(data: list[bytes], path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        for part in data:
            file.write(part)
    sync_file(path)
    sha256_of(path)


if __name__ == "__main__":
    sys.exit(main())
