"""Prepares `make demo`: corpus -> tokenizer -> language model -> reward, critic and prompts."""

import ast
import hashlib
import os
import random
import re
import sysconfig
import time
import tokenize
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.gold import gold_scorer
from examples.demo.pretrained import Built, Log, build_once, code_fingerprint
from rlhf_triton.store.jsonl import write_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The demo's corpus: sentences from the documentation of the standard library, which every Python installation has.
#
# The files are parsed, never imported. Sentences are filtered, deduplicated and put in a fixed order.


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
    if path.parent.name == "pydoc_data":  # one dictionary of help texts
        values = [node.value for node in nodes if isinstance(node, ast.Constant)]
        texts = [value for value in values if isinstance(value, str)]
    else:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    for text in [*texts, *_comment_blocks(nodes, lines)]:
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


NUM_VALIDATION_PROMPTS = 512
PROMPT_TOKENS = 6
NEW_TOKENS = 24


def prepare(out_dir: Path, seed: int, quick: bool = False, log: Log = print) -> Built:
    """Return the folder with `policy`, `reward`, `critic`, `prompts.jsonl` and `validation.jsonl`; build it if needed.

    The accuracies and the perplexity in `figures` are measured on held-out sentences. Raises RlhfError.
    """
    code = code_fingerprint("torch", "transformers", "tokenizers", "vaderSentiment")
    fingerprint = {"seed": seed, "quick": quick, "corpus": corpus_fingerprint(), **code}
    return build_once(out_dir, fingerprint, lambda folder: _build(folder, seed, quick, log), log)


def _build(root: Path, seed: int, quick: bool, log: Log) -> dict[str, Any]:
    """Train all models, write them and the prompts to `root`, and return the figures."""
    import torch

    from examples.demo import models as m
    from rlhf_triton.python_backend.models.modeling import quiet_transformers

    recipe = m.QUICK if quick else m.FULL
    torch.set_num_threads(1 if quick else min(2, len(os.sched_getaffinity(0))))
    quiet_transformers()
    start = time.monotonic()
    corpus = load_corpus(every_nth_source=recipe.every_nth_source)
    sentences = corpus.train[: recipe.max_sentences]
    log(f"corpus: {len(sentences)} sentences, {len(corpus.held_out)} held out")
    tokenizer = m.train_tokenizer(sentences, vocab_size=recipe.vocab_size)
    train_rows, held_out_rows = (_encode(tokenizer, part) for part in (sentences, corpus.held_out))

    policy = m.train_language_model(train_rows, recipe, seed=seed, log=log)
    perplexity = m.perplexity(policy, held_out_rows)
    log(f"language model: held-out perplexity {perplexity:.1f}")
    m.save_checkpoint(policy, tokenizer, root / "policy")
    m.save_critic(root / "policy", root / "critic")

    prompts = _prompts(tokenizer, train_rows)
    unseen = _prompts(tokenizer, held_out_rows, known=set(prompts))
    validation = dict(list(unseen.items())[:NUM_VALIDATION_PROMPTS])
    write_jsonl(root / "prompts.jsonl", _prompt_lines("train", prompts))
    write_jsonl(root / "validation.jsonl", _prompt_lines("validation", validation))

    # The reward model's texts are shaped like PPO's rollouts: a prompt and at most NEW_TOKENS more tokens.
    score = gold_scorer()

    def gold(rows: Sequence[list[int]]) -> list[float]:
        return [score(text) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]

    def read(rows: Sequence[list[int]]) -> list[list[int]]:
        """Return the ids of the texts as the server tokenises them for the reward model: without EOS."""
        return list(tokenizer(tokenizer.batch_decode(rows, skip_special_tokens=True))["input_ids"])

    def samples(prompts: dict[str, list[int]], number: int, seed: int) -> list[list[int]]:
        drawn = random.Random(seed).choices(list(prompts.values()), k=number)
        return read(m.sample(policy, drawn, new_tokens=NEW_TOKENS, seed=seed))

    log(f"reward model: sampling {recipe.num_samples} texts and rating them")
    real, held_out = (read([row[: PROMPT_TOKENS + NEW_TOKENS] for row in part]) for part in (train_rows, held_out_rows))
    rows = real + samples(prompts, recipe.num_samples, seed)
    reward = m.train_reward_model(root / "policy", rows, gold(rows), epochs=recipe.epochs, seed=seed, log=log)
    accuracies = [
        m.pair_accuracy(m.score_rows(reward, part), gold(part))
        for part in (held_out, samples(validation, len(validation), seed + 1))
    ]
    initial = m.score_rows(reward, samples(prompts, recipe.num_standardization, seed + 2))
    figures = {
        "perplexity": perplexity,
        "pair_accuracy_real": accuracies[0],
        "pair_accuracy_samples": accuracies[1],
        **m.save_reward(reward, tokenizer, root / "reward", initial),
        "num_train_sentences": len(train_rows),
        "num_train_prompts": len(prompts),
        "num_validation_prompts": len(validation),
        "seconds": time.monotonic() - start,
    }
    log(f"reward model: pairwise accuracy {accuracies[0]:.3f} (real), {accuracies[1]:.3f} (samples)")
    log(f"prepared in {figures['seconds']:.0f} s")
    return figures


def _encode(tokenizer: "PreTrainedTokenizerFast", sentences: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each sentence, with EOS at the end."""
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(sentences))["input_ids"]]


def _prompts(
    tokenizer: "PreTrainedTokenizerFast", rows: Sequence[list[int]], known: Collection[str] = frozenset()
) -> dict[str, list[int]]:
    """Return {text: token ids} of the sentences' first PROMPT_TOKENS tokens.

    Sentences that are hardly longer are left out, and so are beginnings whose text is in `known`, or whose text gives
    other tokens because it was cut inside a word.
    """
    starts = [row[:PROMPT_TOKENS] for row in rows if len(row) > PROMPT_TOKENS + 2]
    texts = tokenizer.batch_decode(starts)
    again = tokenizer(texts)["input_ids"]
    same = zip(texts, starts, again, strict=True)
    return {text: start for text, start, ids in same if ids == start and text not in known}


def _prompt_lines(name: str, texts: Iterable[str]) -> Iterator[dict[str, str]]:
    return ({"text": text, "prompt_id": f"{name}-{i:05d}"} for i, text in enumerate(texts))
