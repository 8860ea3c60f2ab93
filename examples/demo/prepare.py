"""Prepares `make demo`: corpus -> tokenizer -> language model -> reward, critic and prompts."""

import os
import random
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.corpus import corpus_fingerprint, load_corpus
from examples.demo.gold import gold_scorer
from examples.demo.prepared_folder import Built, Log, build_once, code_fingerprint
from python_backend.store.jsonl import write_jsonl

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from examples.demo.models import Recipe

NUM_VALIDATION_PROMPTS = 512
_SOURCES = ("corpus.py", "gold.py", "models.py", "prepare.py")


def prepare(out_dir: Path, seed: int, quick: bool = False, log: Log = print) -> Built:
    """Return the folder with `policy`, `reward`, `critic`, `prompts.jsonl` and `validation.jsonl`; build it if needed.

    The accuracies and the perplexity in `figures` are measured on held-out sentences. Raises RlhfError.
    """
    fingerprint = {
        "seed": seed,
        "quick": quick,
        "corpus": corpus_fingerprint(),
        **code_fingerprint(_SOURCES, ("torch", "transformers", "tokenizers", "vaderSentiment")),
    }
    return build_once(out_dir, fingerprint, lambda folder: _build(folder, seed, quick, log), log)


def _build(root: Path, seed: int, quick: bool, log: Log) -> dict[str, Any]:
    import torch

    from examples.demo.models import FULL, QUICK

    recipe = QUICK if quick else FULL
    threads = torch.get_num_threads()
    torch.set_num_threads(min(recipe.num_threads, len(os.sched_getaffinity(0))))
    try:
        return _train_and_save(root, recipe, seed, log)
    finally:
        torch.set_num_threads(threads)


def _train_and_save(root: Path, recipe: "Recipe", seed: int, log: Log) -> dict[str, Any]:
    """Train all models, write them and the prompts to `root`, and return the figures."""
    from examples.demo import models as m

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
    m.save_checkpoint(m.start_critic(policy), tokenizer, root / "critic")

    prompts = _prompts(tokenizer, train_rows, recipe.prompt_tokens)
    unseen = _prompts(tokenizer, held_out_rows, recipe.prompt_tokens, known=set(prompts))
    validation = dict(list(unseen.items())[:NUM_VALIDATION_PROMPTS])
    write_jsonl(root / "prompts.jsonl", _prompt_lines("train", prompts))
    write_jsonl(root / "validation.jsonl", _prompt_lines("validation", validation))

    log(f"reward model: sampling {recipe.num_samples} texts and rating them")
    texts = _RewardTexts(policy, tokenizer, recipe)
    rows = texts.real(train_rows) + texts.samples(prompts, recipe.num_samples, seed=seed)
    reward = m.train_reward_model(policy, rows, texts.gold(rows), recipe, seed=seed, log=log)
    held_out = texts.real(held_out_rows)
    held_out_samples = texts.samples(validation, len(validation), seed=seed + 1)
    accuracies = [
        m.pair_accuracy(m.score_rows(reward, part), texts.gold(part)) for part in (held_out, held_out_samples)
    ]
    initial = m.score_rows(reward, texts.samples(prompts, recipe.num_standardization, seed=seed + 2))
    mean, std = initial.mean().item(), initial.std().item()
    reward.config.reward_standardization = {"mean": mean, "std": std}
    m.save_checkpoint(reward, tokenizer, root / "reward")
    figures = {
        "perplexity": perplexity,
        "pair_accuracy_real": accuracies[0],
        "pair_accuracy_samples": accuracies[1],
        "reward_mean": mean,
        "reward_std": std,
        "num_train_sentences": len(train_rows),
        "num_train_prompts": len(prompts),
        "num_validation_prompts": len(validation),
        "seconds": time.monotonic() - start,
    }
    log(f"reward model: pairwise accuracy {accuracies[0]:.3f} (real), {accuracies[1]:.3f} (samples)")
    log(f"prepared in {figures['seconds']:.0f} s")
    return figures


@dataclass(frozen=True)
class _RewardTexts:
    """Training texts of the reward model, shaped like PPO's rollouts: a prompt and at most `new_tokens` more tokens."""

    policy: "LlamaForCausalLM"
    tokenizer: "PreTrainedTokenizerFast"
    recipe: "Recipe"

    def real(self, rows: Sequence[list[int]]) -> list[list[int]]:
        return [row[: self.recipe.prompt_tokens + self.recipe.new_tokens] for row in rows]

    def samples(self, prompts: dict[str, list[int]], number: int, *, seed: int) -> list[list[int]]:
        """Return `number` continuations of prompts drawn with replacement."""
        from examples.demo.models import sample

        drawn = random.Random(seed).choices(list(prompts.values()), k=number)
        return sample(self.policy, drawn, new_tokens=self.recipe.new_tokens, seed=seed)

    def gold(self, rows: Sequence[list[int]]) -> list[float]:
        score = gold_scorer()
        return [score(text) for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]


def _encode(tokenizer: "PreTrainedTokenizerFast", sentences: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each sentence, with EOS at the end."""
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(sentences))["input_ids"]]


def _prompts(
    tokenizer: "PreTrainedTokenizerFast",
    rows: Sequence[list[int]],
    num_tokens: int,
    known: Collection[str] = frozenset(),
) -> dict[str, list[int]]:
    """Return {text: token ids} of the sentences' first `num_tokens` tokens.

    Sentences that are hardly longer are left out, and so are beginnings whose text is in `known`, or whose text gives
    other tokens because it was cut inside a word.
    """
    starts = [row[:num_tokens] for row in rows if len(row) > num_tokens + 2]
    texts = tokenizer.batch_decode(starts)
    again = tokenizer(texts)["input_ids"]
    same = zip(texts, starts, again, strict=True)
    return {text: start for text, start, ids in same if ids == start and text not in known}


def _prompt_lines(name: str, texts: Iterable[str]) -> Iterator[dict[str, str]]:
    return ({"text": text, "prompt_id": f"{name}-{i:05d}"} for i, text in enumerate(texts))
