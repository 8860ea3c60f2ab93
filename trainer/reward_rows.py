"""Reads rows as the served reward model does, for `reward.gate` and for the checks before a run; no torch."""

from python_backend.config import RewardSection
from python_backend.config.rewards import read_template
from python_backend.serving.requests import RowReader
from python_backend.serving.templates import RowTemplate
from python_backend.wire.contract import METADATA, SENTENCES, ContractError, Limits


def row_reader(section: RewardSection, limits: Limits, *, skipped_pad_id: int | None = None) -> RowReader:
    """Return a reader of rows as the served reward model reads them, except that it truncates none."""
    return RowReader(
        section.model.absolute(),
        limits,
        add_special_tokens=section.add_special_tokens,
        skipped_pad_id=skipped_pad_id,
        takes_pairs=section.text == "pair",
        append_eos=section.append_eos,
        template=None if section.template is None else RowTemplate(read_template(section.template)),
        generation_prompt=section.generation_prompt,
        truncates=False,
    )


def without_row(error: ContractError) -> str:
    """Return the message about the only row of a request, without its place in the request."""
    return str(error).removeprefix(f"{METADATA}[0]").removeprefix(f"{SENTENCES}[0]").lstrip(".: ")
