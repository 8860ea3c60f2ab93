"""Log-probs and entropies of tokens under the policy's models, `[B, S-1]`: position t belongs to token t+1."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_triton.actor.generation.shared_prompts import can_share, response_hidden, shared_passes
from rlhf_triton.actor.policy.loading import PolicyModels
from rlhf_triton.models.gpu import to_device
from rlhf_triton.models.language_model import check_causal
from rlhf_triton.models.logprobs import sampling_entropy, target_logprobs
from rlhf_triton.models.output_head import head_logprobs, linear_head
from rlhf_triton.models.precision import in_float32
from rlhf_triton.training_engine.sharding import is_sharded

Entropy = Literal["none", "value", "gradient"]  # whether entropies are computed, and with a gradient


class PlacedRows(NamedTuple):
    """Rows on the device of a model, with the N positions whose log-probs are computed."""

    tokens: Tensor  # int64 [B, S]
    lengths: Tensor  # int64 [B]
    rows: Tensor  # int64 [N]
    columns: Tensor  # int64 [N]
    passes: tuple[Tensor, ...]  # from `shared_passes`; () for plain forward passes


class PolicyLogprobs(NamedTuple):
    """The log-probs of a batch under a model; 0 at other positions."""

    logprobs: Tensor  # [B, S-1], differentiable
    entropies: Tensor | None  # [B, S-1], of the distribution that samples token t+1; None if they are not computed


class TokenLogprobs:
    """Computes log-probs of rows of tokens, with as few positions and prompts as necessary."""

    def __init__(self, models: PolicyModels, *, temperature: float, banned_ids: Sequence[int]) -> None:
        """Try on the generator which forward passes give equal results. Raises CheckpointError if it is not causal."""
        self._models = models
        self._sampling: dict[str, Any] = {"temperature": temperature, "banned_token_ids": banned_ids}
        causal = models.causal(models.generator)
        with in_float32(causal):
            self._head_is_linear = linear_head(causal) is not None
            # Shared prompts need a cache, which checkpointed layers do not support.
            self.shares_prompts = not models.settings.gradient_checkpointing and can_share(causal)
            # On a GPU a mask would disable the fast attention kernels; padding on the right does not need a mask.
            self.masks = models.generator.device.type == "cpu"
        with models.computing():
            check_causal(causal)
            if self.shares_prompts and models.settings.precision == "bfloat16":
                self.shares_prompts = can_share(causal)

    def compute(self, model: Any, tokens: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
        """Return the log-probs of `tokens` `[B, S]` under `model`, `[B, S-1]`, differentiable; 0 where `mask` is 0.

        Logits are computed only for positions inside `mask` `[B, S-1]`. The arguments are on the host, the result on
        the model's device.
        """
        placed, _ = self.place(model, tokens, lengths, mask)
        return self.of_placed(model, placed).logprobs

    def place(
        self, model: Any, tokens: Tensor, lengths: Tensor, mask: Tensor, *others: Tensor
    ) -> tuple[PlacedRows, Sequence[Tensor]]:
        """Copy the rows, and `others`, to the device of `model` at once; return both. Arguments as in `compute`."""
        inside = mask != 0
        # Not with sharded weights: the number of forward passes would depend on the rows, and so differ between ranks.
        shares_prompts = self._head_is_linear and self.shares_prompts and not is_sharded(self._models.causal(model))
        passes = shared_passes(tokens, lengths, inside) if shares_prompts else None
        inputs = tokens, lengths, *inside.nonzero(as_tuple=True), *(passes or ())
        placed = to_device(model.device, *inputs, *others)
        ids, sizes, rows, columns, *placed_passes = placed[: len(inputs)]
        return PlacedRows(ids, sizes, rows, columns, (*placed_passes,)), placed[len(inputs) :]

    def of_placed(self, model: Any, placed: PlacedRows, *, entropy: Entropy = "none") -> PolicyLogprobs:
        """Return the log-probs of placed rows, without waiting for the device.

        Entropies are differentiable only with `entropy: gradient`.
        """

        def scattered(values: Tensor) -> Tensor:
            # By indices: with a mask, the host would wait until the GPU has counted its positions.
            zeros = values.new_zeros(placed.tokens.shape[0], placed.tokens.shape[1] - 1)
            return zeros.index_put((placed.rows, placed.columns), values)

        logprobs, entropies = self._models.compute(model, self._at_positions, entropy, *placed[:4], *placed.passes)
        if entropies is None:
            return PolicyLogprobs(scattered(logprobs), None)
        return PolicyLogprobs(
            scattered(logprobs), scattered(entropies if entropy == "gradient" else entropies.detach())
        )

    def _at_positions(
        self,
        causal: Any,
        entropy: Entropy,
        tokens: Tensor,
        lengths: Tensor,
        rows: Tensor,
        columns: Tensor,
        *passes: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies `[N]` at the N positions of `PlacedRows`, whose fields are the arguments."""
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if self.masks:
            columns_of_tokens = torch.arange(tokens.shape[1], device=tokens.device)
            inputs["attention_mask"] = (columns_of_tokens[None] < lengths[:, None]).long()
        targets = tokens[rows, columns + 1]
        if self._head_is_linear:
            with self._models.computing():
                if passes:
                    hidden = response_hidden(causal.base_model, *passes)
                else:
                    hidden = causal.base_model(**inputs)[0][rows, columns]
            head = causal.get_output_embeddings()
            return head_logprobs(hidden, head, targets, with_entropy=entropy != "none", **self._sampling)
        with self._models.computing():
            logits = causal(**inputs).logits[rows, columns]
        logprobs = target_logprobs(logits, targets, **self._sampling)
        logits = logits if entropy == "gradient" else logits.detach()
        return logprobs, None if entropy == "none" else sampling_entropy(logits, **self._sampling)
