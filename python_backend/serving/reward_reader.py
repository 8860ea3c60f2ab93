"""Builds the reader of a reward model's rows: for the server, `reward.gate` and the checks before a run; no torch."""

from collections.abc import Callable
from pathlib import Path

from rlhf_triton.python_backend.serving.requests import RowReader
from rlhf_triton.python_backend.serving.step_rewards import StepReader
from rlhf_triton.python_backend.serving.templates import RowTemplate
from rlhf_triton.wire.contract import PROCESS, Limits


def reward_reader(
    folder: Path,
    limits: Limits,
    get: Callable[[str], str | None],
    *,
    skipped_pad_id: int | None = None,
) -> RowReader:
    """Return the row reader for the reward model in `folder`; see `RowReader`.

    Args:
        get: returns a parameter of the model's config.pbtxt by name; None if it is not set.

    Raises:
        CheckpointError, ValueError: a parameter does not fit the model.
    """
    adds = get("add_special_tokens") == "true"
    logit = get("logit")
    process = get(PROCESS)
    template = get("template")
    if process is not None:
        return StepReader(
            folder,
            limits,
            add_special_tokens=adds,
            per_token=process == "token",
            separator=get("step_separator"),
            mark=get("step_mark"),
            apart=logit is None,
        )
    return RowReader(
        folder,
        limits,
        add_special_tokens=adds,
        skipped_pad_id=skipped_pad_id,
        append_eos=get("append_eos") == "true",
        takes_pairs=get("text") == "pair",
        template=None if template is None else RowTemplate(template),
        generation_prompt=get("generation_prompt") == "true",
    )
