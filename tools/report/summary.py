"""Writes summary.json of a finished run, sums up one that has none, and reads the held-out texts as pairs.

With `gold`, also adds the gold score of each text to samples.jsonl.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from python_backend.store.durable import read_json, replace_file
from python_backend.store.jsonl import each_line, write_jsonl
from examples.demo.gold import gold_scorer, paired_ci95, words_that_gained

OF_EVERY_ACTOR = ("steps", "failed_requests", "masked_samples", "seconds_per_step")
SUMMARY_KEYS = {  # possible keys of summary.json, in the file's order, with their descriptions in the report
    "steps": "Number of steps; each is one batch of rollouts and the update on it.",
    "reward_before": "Mean reward of the initial policy's texts on the held-out prompts.",
    "reward_after": "The same for the final policy, same prompts and sampling seeds.",
    "process_reward_before": "Mean reward of a step of these texts, by the process reward.",
    "process_reward_after": "The same for the final policy.",
    "steps_before": "Mean number of steps of the initial policy's texts.",
    "steps_after": "The same for the final policy.",
    "reward_gain_ci95": "95 % interval of the reward's gain: paired bootstrap over the prompts.",
    "gold_before": "Mean gold score of the initial policy's texts; PPO never sees it.",
    "gold_after": "The same for the final policy.",
    "gold_ci95": "95 % interval of the gold gain: paired bootstrap over the prompts.",
    "top_word": "The rated word that contributed most to the gold gain.",
    "gold_gain_without_top_word_ci95": "The gain's 95 % interval when that word is removed from the lexicon.",
    "kl_final": "KL from the initial to the final policy, nats per sequence, on the held-out prompts.",
    "distinct2_before": "Distinct bigrams of words over all bigrams, in all held-out responses before training.",
    "distinct2_after": "The same after training: a collapse onto a few phrases would show here.",
    "unique_before": "Share of different responses among the held-out responses before training.",
    "unique_after": "The same after training.",
    "ev_v0": "Share of the returns' variance that critic version 0 explains on the held-out rollouts.",
    "ev_last": "The same for the last version, queried through the server, on the same rollouts.",
    "weights_version": "Version of the critic's weights that was served at the end.",
    "critic_updates": "Critic updates that were sent to the sidecar.",
    "failed_critic_updates": "Critic updates that failed in the sidecar; the run continued.",
    "reloads_swap": "New weights loaded in place, inside the running server process.",
    "reloads_triton": "New weights loaded through Triton's load call, in a fresh model instance.",
    "failed_requests": "Requests that failed, by the client's count.",
    "server_failures": "Requests that failed, by the server's own count (nv_inference_request_failure).",
    "masked_samples": "Samples that were excluded from training because they have no reward.",
    "seconds_total": "Seconds of the last start of `tools run`, preparation included.",
    "seconds_per_step": "Mean seconds per step.",
    "swap_ms_p50": "Median milliseconds from publishing to serving, by swap.",
    "triton_reload_ms_p50": "Median milliseconds of a Triton reload; the old weights serve meanwhile.",
    "peak_rss_mb": "Peak memory of all processes together, in MB.",
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One held-out prompt, continued by the initial and by the final policy.

    A text is prompt + response. For a chat it is the response alone, and `prompt` is the last message.
    """

    prompt_id: str
    prompt: str
    response_before: str
    response_after: str
    text_before: str
    text_after: str
    reward_before: float | None
    reward_after: float | None
    gold_before: float | None
    gold_after: float | None
    is_chat: bool = False


def write_summary(
    run_dir: Path,
    *,
    gold: bool,
    server_failures: int,
    peak_rss_mb: float,
    seconds_total: float,
) -> dict[str, Any]:
    """Write summary.json and return it: SUMMARY_KEYS, without those that the run did not measure.

    The gold score is computed on prompt + response, like the reward model's training labels: a negation or a booster at
    the end of the prompt affects the response, and what the prompt contributes is the same before and after. For a chat
    it is computed on the reply, which is what the reward model reads.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or a text has no partner.
    """
    summary = _known(
        {
            **_actor_figures(run_dir, gold=gold),
            "server_failures": server_failures,
            "peak_rss_mb": peak_rss_mb,
            "seconds_total": seconds_total,
        }
    )
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    replace_file(run_dir / "summary.json", text.encode(), durable=False)
    return summary


def current_summary(run_dir: Path) -> tuple[dict[str, Any], bool]:
    """Return the summary of a run at any time, and whether its actor has finished.

    The summary is that of summary.json if it was written after the last step. Otherwise it has those SUMMARY_KEYS that
    the actor's own summary or the metrics of the steps provide.
    """
    figures = _step_figures(run_dir)
    written = read_json(run_dir / "summary.json") or {}
    if written.get("steps") == figures["steps"]:
        return written, True
    actor = read_json(run_dir / "actor_summary.json") or {}
    finished = actor.get("steps") == figures["steps"]
    if finished:
        figures = _actor_figures(run_dir, gold=False)
    return _known(figures), finished


def has_samples(run_dir: Path) -> bool:
    """Return whether samples.jsonl has lines, that is, whether the run validated."""
    path = run_dir / "samples.jsonl"
    return path.is_file() and path.stat().st_size > 0


def read_pairs(run_dir: Path) -> list[Pair]:
    """Return the pairs in samples.jsonl, in its order. Raises ValueError if a text is repeated or has no partner."""
    path = run_dir / "samples.jsonl"
    sides: dict[str, dict[str, dict[str, Any]]] = {"before": {}, "after": {}}
    for row in each_line(path, required=True):
        side = sides.get(row["when"])
        if side is None:
            raise ValueError(f"{path}: 'when' is {row['when']!r}, not 'before' or 'after'")
        if row["prompt_id"] in side:
            raise ValueError(f"{path}: prompt_id {row['prompt_id']!r} occurs twice with when={row['when']!r}")
        side[row["prompt_id"]] = row
    before, after = sides["before"], sides["after"]
    unpaired = sorted(before.keys() ^ after.keys())
    if unpaired or not before:
        found = f"{len(before)} texts before, {len(after)} after"
        raise ValueError(f"{path} has {found}; texts without a counterpart: {', '.join(unpaired[:5]) or 'none'}")
    # If no response has a leading space, the decoder strips it; without one, prompt and response would run together.
    stripped = not any(row["response"][:1].isspace() for side in sides.values() for row in side.values())
    return [_pair(row, after[prompt_id], " " if stripped else "") for prompt_id, row in before.items()]


def gold_gains(pairs: Sequence[Pair], extra_dropped: Sequence[str] = ()) -> tuple[list[float], list[float]]:
    """Return the gold scores (before, after) of the pairs, with the words `extra_dropped` removed from the lexicon."""
    score = gold_scorer(extra_dropped=extra_dropped)
    return [score(pair.text_before) for pair in pairs], [score(pair.text_after) for pair in pairs]


def word_gains(pairs: Sequence[Pair]) -> list[tuple[str, float]]:
    """Return (word, gain in gold score per text), largest gain first."""
    return words_that_gained([pair.text_before for pair in pairs], [pair.text_after for pair in pairs])


def distinct2(texts: Sequence[str]) -> float | None:
    """Return the ratio of distinct word bigrams to all word bigrams; None if no text has two words."""
    words = [text.split() for text in texts]
    bigrams = [pair for row in words for pair in pairwise(row)]
    return len(set(bigrams)) / len(bigrams) if bigrams else None


def _pair(before: dict[str, Any], after: dict[str, Any], glue: str) -> Pair:
    prompt = before["prompt"]
    if after["prompt"] != prompt:
        raise ValueError(f"prompt {before['prompt_id']!r} differs: {prompt!r} before, {after['prompt']!r} after")
    is_chat = "question" in before
    start = "" if is_chat else prompt + glue
    return Pair(
        prompt_id=before["prompt_id"],
        prompt=before.get("question", prompt),
        response_before=before["response"],
        response_after=after["response"],
        text_before=start + before["response"],
        text_after=start + after["response"],
        reward_before=before["reward"],
        reward_after=after["reward"],
        gold_before=before.get("gold"),
        gold_after=after.get("gold"),
        is_chat=is_chat,
    )


def _actor_figures(run_dir: Path, *, gold: bool) -> dict[str, Any]:
    """Return the figures of a run whose actor has finished; with `gold`, also add the gold scores to samples.jsonl."""
    figures = _actor_summary(run_dir / "actor_summary.json")
    # `reward_before` shows that the run validated; only a run that did not validate may lack samples.jsonl.
    if gold or "reward_before" in figures or has_samples(run_dir):
        if gold:
            _add_gold(run_dir / "samples.jsonl")
        pairs = read_pairs(run_dir)
        figures |= _text_figures(pairs) | (_gold_figures(pairs) if gold else {})
    if "critic_updates" in figures:
        figures |= _reload_figures(each_line(run_dir / "critic_metrics.jsonl", required=True))
    return figures


def _step_figures(run_dir: Path) -> dict[str, Any]:
    """Return the figures of the steps so far, from metrics.jsonl and critic_metrics.jsonl."""
    last: dict[str, Any] = {}
    num_rows, seconds, masked = 0, 0.0, 0
    for row in each_line(run_dir / "metrics.jsonl"):
        last, num_rows = row, num_rows + 1
        seconds += row.get("timers/step_time", 0.0)
        masked += int(row.get("train_rollouts/masked_samples", 0))
    if not last:
        return {"steps": 0}
    figures = {
        "steps": last["step"],
        "failed_requests": int(last.get("client/failed_requests", 0)),
        "masked_samples": masked,
        "seconds_per_step": seconds / num_rows,
    }
    if "train_rollouts/weights_version" in last:
        figures["critic_updates"] = last["step"]
        figures["failed_critic_updates"] = int(last.get("client/failed_critic_updates", 0))
        figures |= _reload_figures(each_line(run_dir / "critic_metrics.jsonl"))
    return figures


def _actor_summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the actor writes it when its last step is done")
    actor = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in OF_EVERY_ACTOR if key not in actor]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return dict(actor)


def _add_gold(path: Path) -> None:
    before, after = gold_gains(pairs := read_pairs(path.parent))
    gold = {("before", pair.prompt_id): score for pair, score in zip(pairs, before, strict=True)}
    gold |= {("after", pair.prompt_id): score for pair, score in zip(pairs, after, strict=True)}
    rows = (row | {"gold": gold[row["when"], row["prompt_id"]]} for row in each_line(path))
    write_jsonl(path, rows, durable=False)


def _text_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the diversity of the responses, and mean rewards over the pairs that have both, if any."""
    figures: dict[str, Any] = {}
    for when in ("before", "after"):
        responses = [getattr(pair, f"response_{when}") for pair in pairs]
        figures[f"distinct2_{when}"] = distinct2(responses)
        figures[f"unique_{when}"] = len(set(responses)) / len(responses)
    scored = [
        (pair.reward_before, pair.reward_after)
        for pair in pairs
        if pair.reward_before is not None and pair.reward_after is not None
    ]
    if scored:
        for key, side in zip(("reward_before", "reward_after"), zip(*scored, strict=True), strict=True):
            figures[key] = statistics.fmean(side)
        figures["reward_gain_ci95"] = list(paired_ci95(*zip(*scored, strict=True)))
    return figures


def _gold_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    before, after = gold_gains(pairs)
    # Negations and boosters can gain too, but cannot be removed from the lexicon: alone they score 0.
    score = gold_scorer()
    top_word = next((word for word, _ in word_gains(pairs) if score(word)), None)
    without = gold_gains(pairs, [top_word] if top_word else [])
    return {
        "gold_before": statistics.fmean(before),
        "gold_after": statistics.fmean(after),
        "gold_ci95": list(paired_ci95(before, after)),
        "top_word": top_word,
        "gold_gain_without_top_word_ci95": list(paired_ci95(*without)),
    }


def _reload_figures(critic: Iterable[dict[str, Any]]) -> dict[str, Any]:
    milliseconds: dict[str, list[float | None]] = {"swap": [], "triton": []}
    for row in critic:
        if row.get("reload") in milliseconds:
            milliseconds[row["reload"]].append(row.get("reload_ms"))
    figures: dict[str, Any] = {}
    for kind, p50 in (("swap", "swap_ms_p50"), ("triton", "triton_reload_ms_p50")):
        times = [ms for ms in milliseconds[kind] if ms is not None]
        figures[f"reloads_{kind}"] = len(milliseconds[kind])
        figures[p50] = statistics.median(times) if times else None
    return figures


def _known(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the SUMMARY_KEYS, in order, that have a value other than None, NaN and infinity."""
    return {key: figures[key] for key in SUMMARY_KEYS if _is_known(figures.get(key))}


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
