"""The reference's log-probs against transformers' forward of each row alone; and what tells two references apart."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import POSITIONS, VOCAB, save_tiny
from transformers import AutoModelForCausalLM, GraniteConfig

from actor.policy.policy import Policy
from python_backend.checkpoints.inspection import CheckpointError, fingerprint_weights
from python_backend.checkpoints.tokenization import end_of_sequence, load_tokenizer, special_tokens
from python_backend.models import output_head
from tests.support.loaders import load_language_model
from tests.support.settings import actor_section
from tools.calibrate.worker import Measurement

LENGTHS = (5, 1, 32, 2, 17, 3, 31)
SAMPLING: dict[str, Any] = {"temperature": 0.7, "banned_token_ids": [0, 2]}


def rows_of(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[np.ndarray]:
    """Token rows, banned ids among them."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, length, dtype=np.int64) for length in lengths]


def direct(folder: Path, row: np.ndarray, *, temperature: float, banned_token_ids: Sequence[int]) -> np.ndarray:
    """`[length]`: transformers' forward of the row alone, log_softmax, one token after the other."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(row)[None]).logits[0].double() / temperature
    logits[:, list(banned_token_ids)] = -torch.inf
    found = [float(logits[t].log_softmax(-1)[row[t + 1]]) for t in range(row.size - 1)]
    return np.asarray([*found, 0.0], np.float32)


def assert_direct(folder: Path, model: Any, rows: list[np.ndarray], **sampling: Any) -> None:
    for row, found in zip(rows, model.logprobs(rows), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, direct(folder, row, **(sampling or SAMPLING)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt", "gptj"])
def test_log_probs_are_those_of_each_row_alone(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "language")
    assert_direct(tmp_path, load_language_model(tmp_path, **SAMPLING), rows_of())


def test_a_model_that_changes_its_logits_after_the_head(tmp_path: Path):
    config = GraniteConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        logits_scaling=0.25,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(tmp_path)
    assert_direct(tmp_path, load_language_model(tmp_path, **SAMPLING), rows_of())


def test_tied_embeddings_and_plain_sampling(tmp_path: Path):
    save_tiny(tmp_path, "qwen2", "language", tie_word_embeddings=True)
    model = load_language_model(tmp_path)
    assert_direct(tmp_path, model, rows_of(), temperature=1.0, banned_token_ids=[])
    assert_direct(tmp_path, model, rows_of([1, 1]), temperature=1.0, banned_token_ids=[])  # nothing to predict


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_model_that_sees_later_tokens_is_no_reference(tmp_path: Path, family: str):
    save_tiny(tmp_path / "0", family, "language")
    with pytest.raises(CheckpointError, match=r"is not causal.*set is_decoder: true"):
        load_language_model(tmp_path / "0", **SAMPLING)
    save_tiny(tmp_path / "1", family, "language", is_decoder=True)
    assert_direct(tmp_path / "1", load_language_model(tmp_path / "1", **SAMPLING), rows_of())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_positions_that_predict_get_logits_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
):
    for limit in ("MAX_LOGITS", "MAX_LOGITS_ON_CARD"):
        monkeypatch.setattr(output_head, limit, 7 * VOCAB + 1)
    sizes: list[int] = []
    logits_of = output_head._logits

    def watched(context: Any, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits_of(context, hidden, *args)

    monkeypatch.setattr(output_head, "_logits", watched)
    save_tiny(tmp_path, family, "language")
    model = load_language_model(tmp_path, **SAMPLING)
    assert_direct(tmp_path, model, rows_of())
    assert max(sizes) == 7
    assert sum(sizes) == sum(LENGTHS) - len(LENGTHS)


def test_bfloat16_weights_give_float32_log_probs(tmp_path: Path):
    save_tiny(tmp_path, "llama", "language")
    model = load_language_model(tmp_path, dtype="bfloat16", **SAMPLING)
    assert {parameter.dtype for parameter in model.model.model.layers[0].mlp.parameters()} == {torch.bfloat16}
    exact = load_language_model(tmp_path, **SAMPLING).logprobs(rows_of())
    for found, expected in zip(model.logprobs(rows_of()), exact, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=0.3)


def test_a_checkpoint_without_a_language_model_is_refused(tmp_path: Path):
    save_tiny(tmp_path / "body", "llama", "body")
    with pytest.raises(CheckpointError, match=r"the weights lack lm_head\.weight"):
        load_language_model(tmp_path / "body")
    save_tiny(tmp_path / "encoder", "deberta-v3", "body")
    with pytest.raises(CheckpointError, match="no causal language model for deberta-v2 models"):
        load_language_model(tmp_path / "encoder")


def test_it_can_be_measured(tmp_path: Path):
    save_tiny(tmp_path, "llama", "language")
    spec = {
        "role": "reference",
        "checkpoint": str(tmp_path),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "workers": 1,
        "max_length": None,
        "options": {},
    }
    assert Measurement(spec).speeds([64])[64] > 0


# ---- what tells two apart ----


def test_the_fingerprint_tells_weights_apart(tmp_path: Path):
    model = save_tiny(tmp_path / "one", "llama", "language")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    known = fingerprint_weights(tmp_path / "one")
    assert len(known) == 64
    assert fingerprint_weights(tmp_path / "copy") == known
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "trained")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "narrow")
    model.save_pretrained(tmp_path / "parts", max_shard_size="2KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    others = [fingerprint_weights(tmp_path / name) for name in ("trained", "narrow", "parts")]
    assert len({known, *others}) == 4


def test_the_fingerprint_of_a_large_file_looks_everywhere(tmp_path: Path):
    """The weights of a file of 8 MiB, moved as little as an update moves them."""
    model = save_tiny(tmp_path, "llama", "language", vocab_size=65_536)
    known = fingerprint_weights(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].numel() == 1 << 20
    for name, parameter in model.named_parameters():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            with torch.no_grad():
                parameter.add_(1e-4)
            model.save_pretrained(tmp_path)
            assert fingerprint_weights(tmp_path) != known, name
            known = fingerprint_weights(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("has_file", [True, False])
def test_the_end_of_sequence_is_what_the_loaded_policy_says(tmp_path: Path, family: str, has_file: bool):
    save_tiny(tmp_path, family, "language")
    assert (tmp_path / "generation_config.json").is_file()
    if not has_file:
        (tmp_path / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    assert end_of_sequence(tmp_path) == model.generation_config.eos_token_id is not None


def test_what_is_rendered_as_banned_is_what_the_policy_bans(checkpoints: Any):
    policy = Policy.of(actor_section(checkpoint=checkpoints.policy, kl_reference="triton"))
    assert policy.reference is None
    assert policy.banned_ids == [0, 2]
    folder = checkpoints.policy
    assert special_tokens(load_tokenizer(folder), end_of_sequence(folder)).banned_ids == [0, 2]


class Tokenizer:
    """What `special_tokens` looks at."""

    def __init__(self, eos: int | None, pad: int | None, bos: int | None) -> None:
        self.eos_token_id, self.pad_token_id, self.bos_token_id = eos, pad, bos


@pytest.mark.parametrize(
    ("ids", "eos", "expected"),
    [
        ((1, 2, 0), None, ([1], 2, [0, 2])),
        ((1, None, 0), [3, 1], ([1, 3], 1, [0])),  # padded with an end of sequence, which may be sampled
        ((1, 1, 1), 5, ([1, 5], 1, [])),  # one token for all three, as GPT-2 has it
        ((None, 4, None), 7, ([7], 4, [4])),
    ],
)
def test_tokens_with_a_role(ids: tuple[int | None, ...], eos: Any, expected: tuple[list[int], int, list[int]]):
    special = special_tokens(Tokenizer(*ids), eos)
    assert (special.eos_ids, special.pad_id, special.banned_ids) == expected


@pytest.mark.parametrize(
    ("ids", "eos", "expected"),
    [
        ((1, 10, 11), None, ([1], 1, [])),  # added to the tokenizer alone
        ((1, 9, 10), None, ([1], 9, [9])),
        ((10, None, 0), 3, ([3, 10], 3, [0])),
        ((12, 11, None), None, ([12], 0, [])),
    ],
)
def test_tokens_that_a_model_of_ten_has_no_embedding_for(
    ids: tuple[int | None, ...], eos: Any, expected: tuple[list[int], int, list[int]]
):
    special = special_tokens(Tokenizer(*ids), eos, vocab_size=10)
    assert (special.eos_ids, special.pad_id, special.banned_ids) == expected


def test_without_an_end_of_sequence_there_is_no_policy():
    with pytest.raises(ValueError, match="define no end-of-sequence token"):
        special_tokens(Tokenizer(None, 0, 0), None)
