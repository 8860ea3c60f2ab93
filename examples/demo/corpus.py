"""The demo's corpus: sentences from the documentation of the standard library, which every Python installation has.

The files are parsed, never imported. Sentences are filtered, deduplicated and put in a fixed order.
"""

import ast
import hashlib
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NUM_HELD_OUT = 1500
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

_SENTENCE = re.compile(r"[A-Z][A-Za-z,.;:'() -]{18,198}\.")
# camelCase, dotted names, calls and runs of capitals: code, not English.
_CODE = re.compile(r"[a-z][A-Z]|\w\.\w|\w\(|[A-Z]{4}")
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[A-Z])")
_BLANK_LINE = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Corpus:
    """Sentences of 20 - 200 characters; no sentence is in both parts."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def stdlib_sources(root: Path | None = None) -> list[Path]:
    """Return the standard library's Python files, sorted, without tests and third-party packages."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = (path for path in folder.rglob("*.py") if not path.name.startswith("_sysconfigdata"))
    return sorted(p for p in files if not SKIPPED_FOLDERS.intersection(p.relative_to(folder).parts[:-1]))


def corpus_fingerprint(root: Path | None = None) -> str:
    """Return the SHA-256 of the source files' names and contents; cheap, since nothing is parsed."""
    digest = hashlib.sha256()
    for path in stdlib_sources(root):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def load_corpus(root: Path | None = None, *, num_held_out: int = NUM_HELD_OUT, every_nth_source: int = 1) -> Corpus:
    """Return the corpus, ordered by each sentence's sha256; at most a fifth of it is held out.

    This order is the same on every machine and mixes the modules. The relative order of two sentences stays the same
    when another Python version adds or removes sentences.
    """
    found = {sentence for path in stdlib_sources(root)[::every_nth_source] for sentence in _sentences_of_file(path)}
    ordered = sorted(found, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())
    cut = min(num_held_out, len(ordered) // 5)
    return Corpus(train=tuple(ordered[cut:]), held_out=tuple(ordered[:cut]))


def sentences_of(text: str) -> Iterator[str]:
    """Yield the plain English sentences of one docstring, comment block or help topic."""
    for paragraph in _BLANK_LINE.split(text):
        for piece in _SENTENCE_END.split(" ".join(paragraph.split())):
            if _SENTENCE.fullmatch(piece) and not _CODE.search(piece):
                yield piece


def _sentences_of_file(path: Path) -> Iterator[str]:
    tree, lines = _parse(path)
    nodes = list(ast.walk(tree))  # walk the tree once: this takes half of the time
    topics = path.parent.name == "pydoc_data"
    for text in [*(_all_strings(nodes) if topics else _docstrings(nodes)), *_comment_blocks(nodes, lines)]:
        yield from sentences_of(text)


def _parse(path: Path) -> tuple[ast.Module, list[str]]:
    """Return the file's syntax tree and lines; both are empty if this Python cannot parse it (parts of lib2to3)."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # do not report invalid escapes in library code
            source = file.read()
            return ast.parse(source), source.split("\n")
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[]), []


def _docstrings(nodes: list[ast.AST]) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]


def _all_strings(nodes: list[ast.AST]) -> list[str]:
    """Return all string constants: `pydoc_data.topics` is one dictionary of help texts."""
    values = (node.value for node in nodes if isinstance(node, ast.Constant))
    return [value for value in values if isinstance(value, str)]


def _comment_blocks(nodes: list[ast.AST], lines: list[str]) -> list[str]:
    """Return each run of adjacent comment-only lines as one text.

    The tree tells which lines are inside a string; `tokenize` would too, but takes ten times as long.
    """
    inside_string: set[int] = set()
    for node in nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno:
            inside_string.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    blocks: list[list[str]] = []
    previous = -1
    for number, line in enumerate(lines, start=1):
        comment = line.strip()
        if not comment.startswith("#") or number in inside_string:
            continue
        if number != previous + 1:
            blocks.append([])
        blocks[-1].append(comment[2:] if comment.startswith("# ") else "")
        previous = number
    return ["\n".join(block) for block in blocks]
