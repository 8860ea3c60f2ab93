"""`python tests/repeat.py`: runs `make test` again and again in fresh clones, some beside busy loops, to find luck.

Each Python in turn gets a clone of HEAD with an environment of its own. Run it on an otherwise idle machine. Prints
pytest's last lines of each run, and keeps its output in runs/repeat; exits with 1 if any run failed.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "runs" / "repeat"


@contextlib.contextmanager
def busy_loops(number):
    """Keep `number` cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main():
    """Run everything; return 1 if any run failed."""
    parser = argparse.ArgumentParser(description="Run `make test` repeatedly, in fresh clones.")
    parser.add_argument("--pythons", nargs="+", default=["python3.10", "python3.11", "python3.12"], metavar="PYTHON")
    parser.add_argument("--runs", type=int, default=5, help="of each Python; default: 5")
    parser.add_argument("--busy", type=int, default=2, help="of these, how many beside two busy loops; default: 2")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    failed = False
    for python in args.pythons:
        with tempfile.TemporaryDirectory(prefix="rlhf-repeat-") as folder:
            clone = Path(folder) / "clone"
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
            make = ["make", "--no-print-directory", "-C", str(clone), f"PYTHON={python}"]
            subprocess.run([*make, ".venv/.installed"], check=True, stdout=sys.stderr)
            for run in range(1, args.runs + 1):
                is_busy = run > args.runs - args.busy
                with busy_loops(2 if is_busy else 0):
                    done = subprocess.run([*make, "test"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                (OUT / f"{Path(python).name}-{run}.txt").write_text(done.stdout)
                failed |= done.returncode != 0
                said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                said += done.stdout.splitlines()[-1:]  # the numbers, or why make has ended
                print(f"{python}, run {run}{', busy' if is_busy else ''}:", *said, sep="\n    ", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
