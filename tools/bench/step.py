"""`python -m tools bench step --out DIR`: what overlapping a PPO step's parts is worth, and what bounds it.
Given: model sizes. Returns: DIR/result.json, step.png, step_scaling.png and a table. Blocks of steps in changing order:
overlapped, serial, and serial over padded PyTriton services; overlapped and serial where services wait instead of
computing; growth with rollouts and responses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.machine import describe_machine, describe_versions, now_utc
from tools.bench.trace import SIZES

BAR = 0.75
OWN_PHASES = ("generate", "logprobs", "init_logprobs", "train_time")  # the actor's own computing: nothing overlaps it
COMPUTED, WAITED = "computed", "waited"
QUICK: dict[str, Any] = {
    "model": "tiny", "scaling_model": "tiny", "rollout": 8, "longest": 12, "steps": 1, "rounds": 1,
    "scaling_rollouts": "4", "scaling_lengths": "8",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report, or only report; 0 when done, whatever the bar says; 1 if it cannot be measured."""
    arguments = parse_arguments(argv)
    out = arguments.report_only or arguments.out
    if arguments.report_only is None:
        from actor.client import RequestFailed  # tritonclient, and below torch: not for --help
        from tools.bench.children import BenchError
        from tools.bench.step_contests import contests
        from tools.child import ChildDied
        from tools.triton_home import ServerStartError

        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
        out.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "report_only")}
        result: dict[str, Any] = {
            "date": now_utc(), "machine": describe_machine(), "versions": describe_versions(), "settings": settings,
            "samples": [],
        }  # fmt: skip

        def note(sample: dict[str, Any]) -> None:
            result["samples"].append(sample)
            (out / "result.json").write_text(json.dumps(result))
            shown = f"{sample['contest']:<9} {sample['mode']:<11} {sample['rollout']:>4} x {sample['longest']:<4}"
            print(f"{shown} {sample['seconds'] / sample['steps']:7.2f} s a step", file=sys.stderr, flush=True)

        try:
            contests(arguments, out, note, result)
        except (BenchError, ChildDied, RequestFailed, ServerStartError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        (out / "result.json").write_text(json.dumps(result))
    result = json.loads((out / "result.json").read_text())
    from tools.bench.step_picture import draw

    draw(result, out)
    print(report(result))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(prog="python -m tools bench step", description="A PPO step, phase by phase.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of result.json and the pictures")
    where.add_argument("--report-only", type=Path, metavar="DIR", help="table and pictures of what lies there")
    parser.add_argument("--model", default="7m", help=f"of policy, reward and critic: {', '.join(SIZES)}")
    parser.add_argument("--scaling-model", default="1m", help="where growth is measured")
    parser.add_argument("--rollout", type=int, default=64, help="responses of a step")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest response")
    parser.add_argument("--steps", type=int, default=3, help="of a block")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each mode")
    parser.add_argument("--scaling-rollouts", default="16,32,64,128", help="responses of a step")
    parser.add_argument("--scaling-lengths", default="32,64,128,256", help="tokens of the longest response")
    parser.add_argument("--cores", type=int, default=2, help="that all processes share")
    parser.add_argument("--quick", action="store_true", help="one short step of each: shows that it works")
    if "--quick" in (argv if argv is not None else sys.argv):
        parser.set_defaults(**QUICK)
    return parser.parse_args(argv)


def report(result: dict[str, Any]) -> str:
    """Seconds of a step by phase, the ratios, and what the critical path would allow."""
    settings = result["settings"]
    lines = [
        f"{settings['model']} policy, reward and critic, {settings['rollout']} responses of up to "
        f"{settings['longest']} tokens, {settings['cores']} cores"
    ]
    for contest in (COMPUTED, WAITED):
        samples = [sample for sample in result["samples"] if sample["contest"] == contest]
        lines += ["", f"services that {'compute' if contest == COMPUTED else 'wait as long as they would compute'}"]
        lines.append(f"{'':<12}s a step  CPU s   generate  scoring  logprobs  critic update  policy update")
        for mode in dict.fromkeys(sample["mode"] for sample in samples):
            own = [sample for sample in samples if sample["mode"] == mode]
            phases = {name: median_phase(own, name) for name in (*OWN_PHASES, "scoring", "critic_update")}
            logprobs = phases["logprobs"] + phases["init_logprobs"]
            lines.append(
                f"{mode:<12}{median_step(own):>8.2f}{median_step(own, 'cpu_seconds'):>7.1f}{phases['generate']:>11.2f}"
                f"{phases['scoring']:>9.2f}{logprobs:>10.2f}{phases['critic_update']:>15.2f}{phases['train_time']:>15.2f}"
            )
        allowed = critical_path(samples) / median_step([s for s in samples if s["mode"] == "serial"])
        value = ratio(samples, "overlapped", "serial")
        verdict = "" if contest == COMPUTED else f"  {'PASS' if value <= BAR else 'MISS'}, must be <= {BAR:g}"
        lines.append(f"overlapped / serial {value:.2f}; the actor's own computing / serial {allowed:.2f}{verdict}")
        if contest == COMPUTED:
            work = cores_bound(samples, settings["cores"])
            lines.append(f"all processor time on {settings['cores']} cores / serial {work:.2f}")
            lines.append(f"overlapped / serial over padded PyTriton {ratio(samples, 'overlapped', 'padded'):.2f}")
    scaled = [sample for sample in result["samples"] if sample["contest"] == "scaling"]
    lines += ["", f"growth ({settings['scaling_model']}): overlapped, serial, ratio"]
    for key in dict.fromkeys((sample["rollout"], sample["longest"]) for sample in scaled):
        own = [sample for sample in scaled if (sample["rollout"], sample["longest"]) == key]
        pair = [median_step([s for s in own if s["mode"] == mode]) for mode in ("overlapped", "serial")]
        lines.append(f"  {key[0]:>4} x {key[1]:<4}{pair[0]:>8.2f} s{pair[1]:>8.2f} s{pair[0] / pair[1]:>7.2f}")
    return "\n".join(lines)


def median_step(samples: Sequence[dict[str, Any]], key: str = "seconds") -> float:
    """Of the blocks' means."""
    return statistics.median(sample[key] / sample["steps"] for sample in samples)


def median_phase(samples: Sequence[dict[str, Any]], phase: str) -> float:
    """Seconds of one phase in a step."""
    sums = [sum(end - start for name, start, end in s["spans"] if name == phase) / s["steps"] for s in samples]
    return statistics.median(sums)


def critical_path(samples: Sequence[dict[str, Any]]) -> float:
    """Seconds of a step that the actor computes itself, where nothing else runs beside it."""
    serial = [sample for sample in samples if sample["mode"] == "serial"]
    return sum(median_phase(serial, phase) for phase in OWN_PHASES)


def cores_bound(samples: Sequence[dict[str, Any]], cores: int) -> float:
    """Processor time of a serial step spread over all cores, by the step's seconds: no order of its parts beats it."""
    serial = [sample for sample in samples if sample["mode"] == "serial"]
    return median_step(serial, "cpu_seconds") / cores / median_step(serial)


def ratio(samples: Sequence[dict[str, Any]], one: str, other: str) -> float:
    """Median over the rounds of the seconds of `one` by those of `other`."""
    seconds = {(sample["mode"], sample["round"]): sample["seconds"] for sample in samples}
    rounds = {sample["round"] for sample in samples}
    return statistics.median(seconds[one, number] / seconds[other, number] for number in rounds)


if __name__ == "__main__":
    sys.exit(main())
