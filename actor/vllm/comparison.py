"""Digests of a published version of the policy, to compare with the digests of a vLLM server's parameters."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from rlhf_triton.checkpoints.safetensors_header import read_header

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # rows, in this order
WITHIN = {part: (whole, at) for whole, parts in FUSED.items() for at, part in enumerate(parts)}
PADDED_TO = 64  # rows: vLLM pads embeddings with zeros
PACKED = hashlib.sha256().hexdigest()  # of no bytes: only the kernel has the weights, in a form of its own


def published_digests(folder: Path) -> dict[str, set[str]]:
    """Return, by vLLM's name of each parameter, the SHA-256 of its bytes, plain and padded as an embedding is.

    Raises OSError and ValueError if a file cannot be read.
    """
    groups: dict[str, list[tuple[int, Path, int, int, int]]] = {}
    for path in folder.glob("*.safetensors"):
        for name, info in read_header(path).items():
            *stem, module, leaf = ["", *name.split(".")]
            whole, at = WITHIN.get(module, (module, 0))
            rows = info.shape[0] if info.shape else 1
            part = (at, path, info.start, info.num_bytes, info.num_bytes // rows * (-rows % PADDED_TO))
            groups.setdefault(".".join(filter(None, [*stem, whole, leaf])), []).append(part)
    return {name: _digests(sorted(parts)) for name, parts in groups.items()}


def _digests(parts: list[tuple[int, Path, int, int, int]]) -> set[str]:
    state = hashlib.sha256()
    for _, path, start, size, _ in parts:
        with path.open("rb") as file:
            file.seek(start)
            state.update(file.read(size))
    padded = state.copy()
    padded.update(bytes(parts[0][-1]))
    return {state.hexdigest(), padded.hexdigest()}


def differing(published: Mapping[str, set[str]], engine: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the engine's parameters that differ from the published ones, and how many could be compared.

    Args:
        published: what `published_digests` returned.
        engine: SHA-256 by `<ranks>:<name>`. Not compared: packed parameters, and those without a published tensor.
    """
    seen = {name.rpartition(":")[2]: digest for name, digest in engine.items() if digest != PACKED}
    compared = seen.keys() & published.keys()
    return sorted(name for name in compared if seen[name] not in published[name]), len(compared)
