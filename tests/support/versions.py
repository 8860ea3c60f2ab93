"""Versions of weights with other content than was published, under a manifest that fits it."""

import dataclasses

from rlhf_triton.checkpoints.safetensors_header import read_header
from rlhf_triton.digests import digest_of
from rlhf_triton.store.durable import write_json
from rlhf_triton.store.weights import MANIFEST_FILE, WeightsStore


def reseal(folder, **changes):
    """Write the manifest that a version's folder would have with the files that are there now.

    `changes`: fields of the manifest.
    """
    manifest = WeightsStore(folder.parent).manifest(int(folder.name))
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST_FILE)
    fitting = {"files": {path.name: digest_of(path) for path in paths}}
    write_json(folder / MANIFEST_FILE, dataclasses.replace(manifest, **{**fitting, **changes}).to_json())


def tensor_types(folder):
    """Return dtype and shape of the tensors in a version's folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: (info.dtype, info.shape) for path in files for name, info in read_header(path).items()}


def flip(path):
    """Change one bit in the middle of a file, which may be read-only; a second time, change it back."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
