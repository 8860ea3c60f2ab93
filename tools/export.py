"""`rlhf-triton export RUN`: a checkpoint of a run's policy, as a folder that transformers or peft loads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_triton.actor.run.settings import actor_checkpoints, last_step
from rlhf_triton.checkpoints.inspection import CheckpointError, is_same_model
from rlhf_triton.config.command_line import interrupt_on_signals, reporting
from rlhf_triton.store.durable import numbers_in, read_json, write_folder
from rlhf_triton.tools.arguments import parse

if TYPE_CHECKING:
    from rlhf_triton.actor.policy.policy import Policy


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder and print how to load it; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(description="Write a checkpoint of a run's policy for other programs.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder (run.dir)")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint's step; default: the newest")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--merged", action="store_true", help="a Hugging Face model, adapters merged in (default)")
    kinds.add_argument("--peft", action="store_true", help="the adapter alone, in peft's format")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder; default: RUN/export/step-N[-peft]")
    arguments = parse(parser, argv)
    interrupt_on_signals()
    print(export_policy(arguments.run, arguments.step, arguments.out, as_adapter=arguments.peft))
    return 0


def newest_saved_policy(run_dir: Path) -> Path | None:
    """Return the folder `policy` of a run if it has the run's newest policy, which otherwise only a checkpoint has."""
    folder = run_dir / "policy"
    saved = (read_json(folder / "policy.json") or {}).get("step", 0)
    return folder if folder.is_dir() and saved >= last_step(run_dir) else None


def export_policy(run_dir: Path, step: int | None, out: Path | None, *, as_adapter: bool) -> str:
    """Write the policy of a checkpoint to the new folder `out`; return the line of Python that loads it.

    Args:
        step: None for the newest checkpoint.
        out: None for a folder in `run_dir`.
        as_adapter: write the adapter alone; False: a whole model, into which adapters are merged.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, the model it started from cannot be loaded or has
            changed, `out` exists, or the policy has no adapter.
    """
    checkpoints = actor_checkpoints(run_dir)
    steps = numbers_in(checkpoints)
    chosen = max(steps, default=None) if step is None else step
    if chosen not in steps:
        saved = f"it has those of steps {', '.join(map(str, steps))}"
        available = saved if steps else "give the folder (run.dir) of a run that has saved one"
        raise CheckpointError(f"{run_dir} has no checkpoint{'' if step is None else f' of step {step}'}; {available}")
    out = out or run_dir / "export" / f"step-{chosen}{'-peft' if as_adapter else ''}"
    if out.exists():
        raise CheckpointError(f"--out: {out} already exists; choose another folder")
    policy = _policy_of(checkpoints / str(chosen))
    if not as_adapter:
        write_folder(out, policy.save)
        return f"AutoModelForCausalLM.from_pretrained({str(out)!r})"
    if not policy.settings.lora_rank:
        raise CheckpointError(f"--peft: {run_dir} trained all weights (actor.policy.lora_rank: 0); use --merged")
    base = str(policy.settings.model.absolute())
    policy.model.peft_config["default"].base_model_name_or_path = base

    def fill(folder: Path) -> None:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)

    write_folder(out, fill)
    return f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {str(out)!r})"


def _policy_of(folder: Path) -> Policy:
    """Load the policy of a checkpoint that any number of ranks wrote, on the CPU, without its optimizer's state."""
    from rlhf_triton.actor.policy.policy import Policy  # torch: slow to import
    from rlhf_triton.config.actor import ActorSection, KLSection, PolicySection
    from rlhf_triton.store.sealed_folder import verify_folder

    state: dict[str, Any] = verify_folder(folder)
    names = ("precision", "lora_rank", "lora_alpha", "lora_targets", "freeze")
    saved = {name: state["settings"][f"actor.policy.{name}"] for name in names}
    settings = PolicySection(model=Path(state["start"]), **saved)
    kl = KLSection(coef=0.0)  # without a copy of the start as the reference
    policy = Policy(ActorSection(policy=settings, kl=kl), longest_row=(1, ""))
    if not is_same_model(state["start_fingerprint"], policy.fingerprint):
        raise CheckpointError(
            f"{folder} was saved by a run that started from {settings.model}, which has different weights, config.json "
            "or tokenizer now; restore that model"
        )
    policy.trained.load_weights(folder)
    return policy
