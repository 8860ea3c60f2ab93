"""Prepares `make demo`: sentences -> tokenizer -> language model -> reward, critic and prompts.

The sentences are from the documentation of the standard library, which every Python installation has. Its files are
parsed, never imported.
"""

import ast
import hashlib
import os
import random
import re
import shutil
import sysconfig
import tokenize
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.demo.gold import gold_scorer
from examples.demo.pretrained import build_once
from rlhf_triton.store.jsonl import write_jsonl

NUM_HELD_OUT = 1500
NUM_VALIDATION_PROMPTS = 512
PROMPT_TOKENS = 6
NEW_TOKENS = 24
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

_SENTENCE = re.compile(r"[A-Z][A-Za-z,.;:'() -]{18,198}\.")
# camelCase, dotted names, calls and runs of capitals: code, not English.
_CODE = re.compile(r"[a-z][A-Z]|\w\.\w|\w\(|[A-Z]{4}")
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[A-Z])")
_BLANK_LINE = re.compile(r"\n\s*\n")


def load_corpus(every_nth_source: int) -> tuple[list[str], list[str]]:
    """Return sentences of 20 - 200 characters for training, and at most a fifth of all, held out.

    They are ordered by sha256: the same on every machine, with modules mixed. The relative order of two sentences stays
    the same when another Python version adds or removes sentences.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in folder.rglob("*.py") if not path.name.startswith("_sysconfigdata")]
    ours = sorted(p for p in sources if not SKIPPED_FOLDERS.intersection(p.relative_to(folder).parts[:-1]))
    sentences = {sentence for path in ours[::every_nth_source] for sentence in _sentences_of_file(path)}
    ordered = sorted(sentences, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())
    cut = min(NUM_HELD_OUT, len(ordered) // 5)
    return ordered[cut:], ordered[:cut]


def _sentences_of(text: str) -> Iterator[str]:
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
        yield from _sentences_of(text)


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


def prepare(out_dir: Path, seed: int, quick: bool) -> Path:
    """Return the folder with `policy`, `reward`, `critic`, `prompts.jsonl` and `validation.jsonl`; build it if needed.

    Raises RlhfError.
    """
    return build_once(out_dir, lambda folder: _build(folder, seed, quick), seed=seed, quick=quick)


def write_quick_policy(folder: Path) -> None:
    """Write the policy of `make demo` in its quick form to `folder`."""
    with TemporaryDirectory() as temporary:
        shutil.copytree(prepare(Path(temporary) / "sentences", 0, quick=True) / "policy", folder)


def _build(root: Path, seed: int, quick: bool) -> None:
    """Train all models; write them and the prompts to `root`."""
    import torch

    from examples.demo import models as m
    from rlhf_triton.models.modeling import quiet_transformers

    recipe = m.QUICK if quick else m.FULL
    torch.set_num_threads(1 if quick else min(2, len(os.sched_getaffinity(0))))
    quiet_transformers()
    sentences, held_out = load_corpus(recipe.every_nth_source)
    sentences = sentences[: recipe.max_sentences]
    print(f"corpus: {len(sentences)} sentences, {len(held_out)} held out")
    tokenizer = m.train_tokenizer(sentences)
    train_rows = _encode(tokenizer, sentences)
    held_out_rows = _encode(tokenizer, held_out)

    policy = m.train_language_model(train_rows, epochs=recipe.epochs, seed=seed)
    m.save_checkpoint(policy, tokenizer, root / "policy")
    m.save_critic(root / "policy", root / "critic")

    prompts = _prompts(tokenizer, train_rows)
    unseen = _prompts(tokenizer, held_out_rows, excluded=set(prompts))
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

    print(f"reward model: sampling {recipe.num_samples} texts and rating them")
    real = read([row[: PROMPT_TOKENS + NEW_TOKENS] for row in train_rows])
    rows = real + samples(prompts, recipe.num_samples, seed)
    reward = m.train_reward_model(root / "policy", rows, gold(rows), epochs=recipe.epochs, seed=seed)
    unseen_rows = samples(validation, len(validation), seed + 1)
    accuracy = m.pair_accuracy(m.score_rows(reward, unseen_rows), gold(unseen_rows))
    print(f"reward model: pairwise accuracy {accuracy:.3f} on unseen prompts")
    initial = m.score_rows(reward, samples(prompts, recipe.num_standardization, seed + 2))
    m.save_reward(reward, tokenizer, root / "reward", initial)


def _encode(tokenizer: Any, sentences: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each sentence, with EOS at the end."""
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(sentences))["input_ids"]]


def _prompts(
    tokenizer: Any, rows: Sequence[list[int]], excluded: Collection[str] = frozenset()
) -> dict[str, list[int]]:
    """Return {text: token ids} of the sentences' first PROMPT_TOKENS tokens.

    Sentences that are hardly longer are left out, and so are beginnings whose text is in `excluded`, or whose text
    gives other tokens because it was cut inside a word.
    """
    starts = [row[:PROMPT_TOKENS] for row in rows if len(row) > PROMPT_TOKENS + 2]
    texts = tokenizer.batch_decode(starts)
    again = tokenizer(texts)["input_ids"]
    same = zip(texts, starts, again, strict=True)
    return {text: start for text, start, ids in same if ids == start and text not in excluded}


def _prompt_lines(name: str, texts: Iterable[str]) -> Iterator[dict[str, str]]:
    return ({"text": text, "prompt_id": f"{name}-{i:05d}"} for i, text in enumerate(texts))
