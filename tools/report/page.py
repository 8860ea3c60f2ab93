"""`rlhf-triton report`: results, pictures and texts of a run, also while it is in progress, as one HTML file."""

import argparse
import os
import statistics
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rlhf_triton.actor.run.settings import SETTINGS_FILE, flattened
from rlhf_triton.config.command_line import reporting
from rlhf_triton.config.rewards import RewardTerm
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import replace_file
from rlhf_triton.tools.arguments import parse
from rlhf_triton.tools.report.conversations import ReportConversation
from rlhf_triton.tools.report.curves import KL, REWARD, as_svg, pictures
from rlhf_triton.tools.report.data import MAX_TEXTS, SUMMARY_KEYS, RunRecord, formatted, load_run, series
from rlhf_triton.tools.report.sample_pairs import Gain, Pair, Scored, rewarded
from rlhf_triton.tools.report.samples import shown_steps

NUM_TEXTS = 24


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(description="Write the page of a run, finished or in progress.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run (run.dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page; default: report.html in the run's folder")
    arguments = parse(parser, argv)
    out = arguments.out or arguments.run_dir / "report.html"
    try:
        write_page(load_run(arguments.run_dir), out)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise RlhfError("the report needs matplotlib: pip install '.[training]'") from error
    print(f"report: {out}", flush=True)
    return 0


def write_page(run: RunRecord, out: Path) -> None:
    """Write the page of a run, atomically replacing an earlier one. Raises RlhfError if `out` cannot be written."""
    environment = Environment(
        loader=PackageLoader("rlhf_triton.tools"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": formatted,
        "shown": format_value,
        "setting": setting,
        "conversation": ReportConversation.of,
        "base64": lambda text: b64encode(text.encode()).decode(),
    }
    page = environment.get_template("report.html.j2").render(_values(run, out))
    try:
        replace_file(out, page.encode(), durable=False)
    except OSError as error:
        raise RlhfError(f"{out} cannot be written: {error.strerror}") from error


def _values(run: RunRecord, out: Path) -> dict[str, Any]:
    """Return the template's variables; paths are relative to the folder of the page, `out`."""
    reward = run.reward_gain
    sampled, samples_problem = shown_steps(run)
    folder = os.path.relpath(run.folder, out.resolve().parent)
    added = {name: sentence for section in run.sections for name, (_, sentence) in section.figures.items()}
    return {
        "run": run,
        "state": state(run),
        "policy_path": run.policy and os.path.relpath(run.policy, out.resolve().parent),
        "s": run.summary,
        "reward": reward,
        "verdict": reward and verdict("The reward", reward),
        "training": None if run.pairs else ends(run, REWARD),
        "training_kl": None if "kl_final" in run.summary else ends(run, KL),
        "panels": [(caption, as_svg(draw, run)) for caption, draw in pictures(run)],
        "groups": pick_texts(rewarded(run.pairs)) | _failed(run.pairs),
        "replaced": {section.title for section in run.sections},
        "most_texts": MAX_TEXTS,
        "sampled": sampled,
        "samples_problem": samples_problem.replace(str(run.folder), folder),
        "sentences": SUMMARY_KEYS | added,
        "settings": changed_settings(run.settings),
        "settings_file": SETTINGS_FILE,
    }


def state(run: RunRecord) -> str | None:
    """Return a sentence about the progress of an unfinished run; None for a finished one."""
    if run.is_finished:
        return None
    steps = run.summary["steps"]
    total = run.settings.get("actor.steps")
    done = f"step {steps}{f' of {total}' if total else ''}" if steps else "no step"
    return (
        f"In progress: {done} has ended." if run.in_progress else f"The run stopped before its end: {done} has ended."
    )


def pick_texts(scored: Sequence[Scored]) -> dict[str, Sequence[Scored]]:
    """Return {label: pairs with their scores}: the largest gains, those around the median, and the largest losses."""
    ranked = sorted(scored, key=lambda item: item[1] - item[2])
    third = NUM_TEXTS // 3
    if len(ranked) <= NUM_TEXTS:
        return {"By their change": ranked} if ranked else {}
    middle = (len(ranked) - third) // 2
    return {
        "Largest gains": ranked[:third],
        "Around the median": ranked[middle : middle + third],
        "Largest losses": ranked[-third:][::-1],
    }


def _failed(pairs: Sequence[Pair]) -> dict[str, Sequence[tuple[Pair, float | None, float | None]]]:
    """Return {label: the first pairs with a conversation whose environment failed, and their scores}; {} if none."""
    failed = [(pair, pair.reward_before, pair.reward_after) for pair in pairs if pair.has_failed]
    return {f"Failed environments: {len(failed)} of {len(pairs)} prompts": failed[: NUM_TEXTS // 3]} if failed else {}


def verdict(what: str, gain: Gain) -> str:
    """Return a sentence that says how `what` changed; an interval that includes 0 counts as no change."""
    interval = f"95 % interval [{gain.low:.3f}, {gain.high:.3f}]"
    if gain.low > 0:
        return f"{what} rose by {gain.mean:.3f}, {interval}."
    if gain.high < 0:
        return f"{what} fell by {-gain.mean:.3f}, {interval}."
    return f"{what} did not change measurably: {gain.mean:+.3f}, and the {interval} includes 0."


def ends(run: RunRecord, key: str) -> dict[str, Any] | None:
    """Return the means of a metric over the first and the last tenth of the steps; None with fewer than two steps."""
    _, values = series(run.steps, key)
    count = max(1, len(values) // 10)
    if len(values) < 2 * count:
        return None
    first = statistics.fmean(values[:count])
    last = statistics.fmean(values[-count:])
    return {"first": first, "last": last, "part": "tenth of the steps" if count > 1 else "step"}


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults, except ports."""
    defaults = flattened(RunConfig().model_dump(mode="json"))
    of_a_reward = {name: field.default for name, field in RewardTerm.model_fields.items()}
    defaults["reference.model"] = settings.get("actor.policy.model")

    def is_default(key: str, value: Any) -> bool:
        section, _, name = key.rpartition(".")
        known = of_a_reward if section.startswith("rewards.") and key not in defaults else {}
        return bool(value == known.get(name, defaults.get(key)))

    return {key: value for key, value in settings.items() if not is_default(key, value) and not key.endswith("_port")}


def setting(value: Any) -> str:
    """Return a setting as text for a table, in full: a learning rate may be 1e-06."""
    if isinstance(value, list):
        return ", ".join(map(setting, value))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {setting(item)}' for key, item in value.items() if item is not None)}}}"
    return "none" if value is None else f"{value}"


def format_value(value: Any) -> str:
    """Return a figure as text for a table."""
    if isinstance(value, list):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, float):
        return formatted(value, ",.3f" if abs(value) < 100 else ",.0f")
    return f"{value}"
