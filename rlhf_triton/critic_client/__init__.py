"""A value model on Triton for your own trainer: values, updates, checkpoints and rewinds, without a configuration file.

    from rlhf_triton.critic_client import CriticClient

    with CriticClient("127.0.0.1:8000", run_id="mine") as critic:
        critic.rewind(0)                                        # this client now owns the run
        scored = critic.values([[5, 8, 13], [5, 8, 13, 21]])    # rows of token ids, not padded
        critic.train(1, tokens, returns, prev_values, mask)     # step 1; returns once the new weights are served

`CriticClient` is for ordinary code, `AsyncCriticClient`, which has the documentation, for asyncio. Every error that you
can do something about derives from `RlhfError`:

* `ContractError`: an argument is invalid. The message names row and position; nothing was sent.
* `RlhfError`, their base class: the client cannot be used in this way: no critic is served, the client is closed, …
* `RequestRefused`: the server refuses the request, and would refuse it again: a step that does not fit, a wrong key, a
  run that another client has taken over.
* `ServerFailed`: the update was tried and failed. The step counts as done.
* `RequestFailed`: any of these two, or no answer in time. Repeat the call with the same step and the same content.

Needs numpy, pydantic, PyYAML, safetensors and tritonclient[http]; imports neither torch nor transformers.
"""

from rlhf_triton.client.client import TrainAnswer
from rlhf_triton.client.errors import RequestFailed, RequestRefused, ServerFailed
from rlhf_triton.config import ClientSection
from rlhf_triton.critic_client.client import AsyncCriticClient, CriticClient, RowScores, RowValues
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import ContractError

__all__ = [
    "AsyncCriticClient",
    "ClientSection",
    "ContractError",
    "CriticClient",
    "RequestFailed",
    "RequestRefused",
    "RlhfError",
    "RowScores",
    "RowValues",
    "ServerFailed",
    "TrainAnswer",
]
