"""`python docs/counts.py`: how large the project is.

Statements are `ast.stmt` nodes without docstrings, in all tracked Python files; a section is no key.
"""

import ast
import builtins
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Print the counts."""
    from python_backend.config import RunConfig, keys_of

    counts: Counter[str] = Counter()
    bases: dict[str, list[str]] = {}  # of the classes in the source
    for file in subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split():
        text = (ROOT / file).read_text(encoding="utf-8")
        where = "tests" if file.startswith("tests/") else "source"
        counts[f"files of {where}"] += 1
        counts["lines kept from the formatter"] += text.count("# fmt" + ": skip")
        for node in ast.walk(ast.parse(text)):
            counts[f"statements of {where}"] += isinstance(node, ast.stmt) and not is_docstring(node)
            if where == "source" and isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]
    counts["exception classes"] = sum(is_exception(name, bases) for name in bases)
    keys = keys_of(RunConfig, "")
    counts["configuration keys"] = sum(not any(other.startswith(f"{key}.") for other in keys) for key in keys)
    for name, count in counts.items():
        print(f"{count:>7,} {name}")


def is_docstring(node: ast.stmt) -> bool:
    """Return whether it describes a module, a class, a function or a name."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_exception(name: str, bases: dict[str, list[str]]) -> bool:
    """Return whether a class is an exception, by its bases here or in Python."""
    if name in bases:
        return any(is_exception(base, bases) for base in bases[name])
    return issubclass(getattr(builtins, name, object), BaseException)


if __name__ == "__main__":
    main()
