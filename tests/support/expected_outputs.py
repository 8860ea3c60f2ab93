"""Rewards and values that a server must return: those of transformers' own forward pass without padding."""

import functools

import numpy as np
import torch
from transformers import LlamaForSequenceClassification, LlamaForTokenClassification

from rlhf_triton.wire.contract import REWARD_VERSION, REWARDS, VALUES, WEIGHTS_VERSION

TOLERANCE = 1e-5  # for everything that a server computes


@functools.cache
def loaded(kind, folder):
    return kind.from_pretrained(str(folder), dtype=torch.float32).eval()


@functools.cache
def logits_of(kind, folder, row):
    """The logits of a row of tokens, without padding."""
    with torch.no_grad():
        return loaded(kind, folder)(input_ids=torch.frombuffer(bytearray(row), dtype=torch.int64)[None]).logits[0]


def direct_rewards(folder, rows):
    """Return rewards `[B]` of transformers' own forward pass without padding, standardised as in the checkpoint."""
    constants = loaded(LlamaForSequenceClassification, folder).config.reward_standardization
    scores = [float(logits_of(LlamaForSequenceClassification, folder, row.tobytes())) for row in rows]
    return (np.asarray(scores) - constants["mean"]) / constants["std"]


def direct_values(folder, rows):
    """Return the values `[length_i]` of each row by transformers' own forward pass without padding."""
    return [logits_of(LlamaForTokenClassification, folder, row.tobytes())[:, 0].numpy() for row in rows]


def assert_answer(run, rows, answer):
    """The answer has values and rewards of one version of each model, which it names; or only some of these."""
    if VALUES in answer:
        (version,) = {*answer[WEIGHTS_VERSION].ravel().tolist()}
        direct = direct_values(run.store.folder(version), rows)
        for row, ours, expected in zip(rows, answer[VALUES], direct, strict=True):
            np.testing.assert_allclose(ours[: row.size], expected, atol=TOLERANCE, rtol=0)
            assert not ours[row.size :].any()
    if REWARDS in answer:
        (version,) = {*answer[REWARD_VERSION].ravel().tolist()}
        expected = direct_rewards(run.reward_store.folder(version), rows)
        np.testing.assert_allclose(answer[REWARDS][:, 0], expected, atol=TOLERANCE, rtol=0)
