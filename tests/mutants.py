"""`make mutants`: applies each fault in tests/mutations.toml to a copy of the tree, where a test must then fail.

A fault that no test notices is a gap in the tests. Every test that failed must pass on the unchanged tree.
"""

import argparse
import multiprocessing
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutations.toml"
TIMEOUT_S = 120  # limit of each test: a fault may make it wait for something that never happens
# exit codes of pytest; others stand for errors of collection or usage
FAILED = 1
PASSED = 0
# Forked from one process that has imported what takes seconds, and nothing of the project.
PROCESSES = multiprocessing.get_context("forkserver")
IMPORTED = ["aiohttp", "numpy", "safetensors.torch", "torch", "torch._dynamo", "transformers"]


@dataclass(frozen=True)
class Mutation:
    """A fault: a text to replace in a file, and the test files or node ids of which one must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def of(self, source):
        """Return `source` with the fault. Raises ValueError unless the text occurs exactly once."""
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old.strip()!r} {found} times, not once")
        return source.replace(self.old, self.new)

    def check_tests(self):
        """Raise ValueError if a test does not exist, OSError if a file of tests does not."""
        for test in self.tests:
            file, _, name = test.partition("::")
            name = re.split(r"[:\[]", name)[0]
            if not re.search(rf"\b{name}\b", (ROOT / file).read_text()):
                raise ValueError(f"{self.name}: {file} has no test {name}")


def check_names(mutations):
    """Raise ValueError if a fault uses a name that its file does not define: any test would notice such a fault."""
    with tempfile.TemporaryDirectory() as folder:
        for number, mutation in enumerate(mutations):
            if mutation.file.endswith(".py"):
                (Path(folder) / f"{number}.py").write_text(mutation.of((ROOT / mutation.file).read_text()))
        ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--output-format=concise", "--select=F821", folder]
        problems = subprocess.run(ruff, capture_output=True, text=True, check=False).stdout
    wrong = re.search(r"(\d+)\.py:\d+:\d+: (.+)", problems)
    if wrong:
        raise ValueError(f"{mutations[int(wrong[1])].name}: {wrong[2]}")


def read_mutations(path=LIST):
    """Return the faults listed in `path`."""
    return [Mutation(**item) for item in tomllib.loads(path.read_text())["mutation"]]


def copy_tree(target):
    """Copy every file that git tracks, or would track, to `target`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    for name in names:
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():  # links: rlhf_triton has some to folders
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def run_tests(tree, tests, *options):
    """Run tests in a copy of the tree; return pytest's exit code and output."""
    output = tree.with_suffix(".txt")
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = [*quiet, "--timeout", str(TIMEOUT_S), *options, *tests]
    child = PROCESSES.Process(target=_pytest, args=(tree, arguments, output))
    child.start()
    child.join()
    return child.exitcode or PASSED, output.read_text()


def _pytest(tree, arguments, output):
    """Run pytest in this process, which has imported nothing of the project."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.chdir(tree)
    here = str(Path(__file__).parent)
    sys.path[:] = [str(tree), *(path for path in sys.path if path != here)]
    os.environ["PYTHONPATH"] = str(tree)
    sys.exit(int(pytest.main(arguments)))


def failed_test(output):
    """Return the node id of the first test that failed, from pytest's summary."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", output, re.MULTILINE)
    return found and found[1]


def try_mutation(tree, mutation):
    """Apply a fault in `tree`, run its tests up to the first that fails, and undo it; return as `run_tests`."""
    path = tree / mutation.file
    source = path.read_text()
    path.write_text(mutation.of(source))
    try:
        return run_tests(tree, mutation.tests, "-x")
    finally:
        path.write_text(source)


def main():
    """Try the faults; return 1 if one was not noticed, or if a test fails without any."""
    parser = argparse.ArgumentParser(description="Break the code in many ways; a test must fail for each of them.")
    parser.add_argument("only", nargs="*", help="parts of names or paths; default: all faults")
    parser.add_argument("--jobs", type=int, default=2, help="how many to try at a time; default: 2")
    parser.add_argument("--list", action="store_true", help="only check that texts and tests are found")
    args = parser.parse_args()
    chosen = [m for m in read_mutations() if not args.only or any(o in m.name or o in m.file for o in args.only)]
    try:
        for mutation in chosen:
            mutation.of((ROOT / mutation.file).read_text())
            mutation.check_tests()
        check_names(chosen)
    except (ValueError, OSError) as error:
        sys.exit(f"tests/mutations.toml: {error}")
    if args.list:
        print(f"{len(chosen)} faults, each in one place")
        return 0

    # Python compares bytecode and source by size and second only, and might run the bytecode of the previous fault.
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    PROCESSES.set_forkserver_preload(IMPORTED)
    seen = []
    missed = []
    with tempfile.TemporaryDirectory(prefix="rlhf-mutants-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        trees = queue.SimpleQueue()
        for number in range(args.jobs):
            copy_tree(tree := Path(folder) / str(number))
            trees.put(tree)

        def attempt(mutation):
            tree = trees.get()
            code, output = try_mutation(tree, mutation)
            trees.put(tree)
            test = failed_test(output) if code == FAILED else None
            print(f"{'red' if test else 'GREEN' if code == PASSED else 'ERROR'}  {mutation.name}: {test}", flush=True)
            if test:
                seen.append(test)
            else:
                missed.append(mutation.name)
                print(output[-2000:] if code != PASSED else "", end="", flush=True)

        list(pool.map(attempt, chosen))
        code, output = run_tests(trees.get(), sorted({*seen}), "-n", str(args.jobs)) if seen else (PASSED, "")
    if code != PASSED:
        print(f"{output[-4000:]}\nThese tests fail without any fault.")
    print(f"{len(seen)} of {len(chosen)} faults are noticed", *(f"not noticed: {name}" for name in missed), sep="\n")
    return int(bool(missed) or code != PASSED)


if __name__ == "__main__":
    sys.exit(main())
