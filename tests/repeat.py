"""`python tests/repeat.py`: runs `make test` again and again in fresh clones, some beside busy loops, to find luck.

Each Python in turn gets a clone of HEAD with an environment of its own. Run it on an otherwise idle machine. Prints a
table, and keeps each run's output in `--out`; exits with 1 if any failed.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = "{:<12}{:>4}{:>6}{:>8}{:>8}{:>9}{:>9}  {}"


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep `number` cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def outcome(output: str) -> tuple[dict[str, int], list[str]]:
    """Return the counts in pytest's summary, and the names of the tests that failed or had an error."""
    (*_, last) = ["", *re.findall(r"^.* in [\d.]+s.*$", output, re.MULTILINE)]
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return {kind.removesuffix("s"): int(number) for number, kind in counts}, names


def main() -> int:
    """Run everything; return 1 if any run failed."""
    parser = argparse.ArgumentParser(description="Run `make test` repeatedly, in fresh clones.")
    parser.add_argument("--pythons", nargs="+", default=["python3.10", "python3.11", "python3.12"], metavar="PYTHON")
    parser.add_argument("--runs", type=int, default=5, help="of each Python; default: 5")
    parser.add_argument("--busy", type=int, default=2, help="of these runs, how many beside busy loops; default: 2")
    parser.add_argument("--loops", type=int, default=2, help="busy loops beside such a run; default: 2")
    parser.add_argument("--target", default="test", help="of make; default: test")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "repeat", help="default: runs/repeat")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(ROW.format("python", "run", "busy", "passed", "failed", "skipped", "seconds", "failed tests"), flush=True)
    failed = False
    for python in args.pythons:
        with tempfile.TemporaryDirectory(prefix="rlhf-repeat-") as folder:
            clone = Path(folder) / "clone"
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
            make = ["make", "-C", str(clone), f"PYTHON={python}"]
            subprocess.run([*make, ".venv/.installed"], check=True, stdout=sys.stderr)
            for run in range(1, args.runs + 1):
                is_busy, start = run > args.runs - args.busy, time.monotonic()
                with busy_loops(args.loops if is_busy else 0):
                    done = subprocess.run(
                        [*make, args.target], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                    )
                (args.out / f"{Path(python).name}-{run}.txt").write_text(done.stdout)
                counts, names = outcome(done.stdout)
                failed |= done.returncode != 0
                numbers = [counts.get(kind, 0) for kind in ("passed", "failed", "skipped")]
                numbers[1] += counts.get("error", 0)
                said = " ".join(names) or ("-" if done.returncode == 0 else f"make ended with {done.returncode}")
                seconds = f"{time.monotonic() - start:.0f}"
                print(
                    ROW.format(Path(python).name, run, "yes" if is_busy else "no", *numbers, seconds, said), flush=True
                )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
