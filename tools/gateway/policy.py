"""Serves `gateway.policy` to agents through vLLM servers."""

import contextlib

from starlette.routing import Route

from rlhf_triton.actor.capture.app import capture_routes, trainer_routes
from rlhf_triton.actor.capture.sessions import SessionLimits, Sessions
from rlhf_triton.actor.capture.vllm import VllmSampler
from rlhf_triton.checkpoints.special_tokens import special_tokens_in
from rlhf_triton.checkpoints.tokenization import num_embeddings
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.sections import ServedPolicySection

MAX_TOKENS = 1024  # for a request without a limit
MAX_SESSION_TOKENS = 1_000_000  # in all rows of a session; about 20 MB of JSON
MAX_SESSIONS = 1024  # that are open; beyond it, new ones get 429
IDLE_S = 3600.0  # without a request, after which a session is dropped, without an export
REPLY_LIMIT_S = 600.0


def policy_routes(settings: ServedPolicySection, closing: contextlib.AsyncExitStack) -> list[Route]:
    """Return the routes of sessions; `closing` receives their connections. Raises RlhfError, OSError for a folder."""
    if settings.export is not None:
        settings.export.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(settings.model)
    special = special_tokens_in(settings.model)
    sampler = VllmSampler(
        settings.servers,
        eos_ids=special.eos_ids,
        banned_ids=special.banned_ids,
        deadline_s=REPLY_LIMIT_S,
        vocab_size=num_embeddings(settings.model),
    )
    closing.push_async_callback(sampler.close)
    sessions = Sessions(tokenizer, SessionLimits(MAX_SESSION_TOKENS), most=MAX_SESSIONS, idle_s=IDLE_S)
    routes = capture_routes(sessions, sampler, model=settings.model.name, max_tokens=MAX_TOKENS)
    return [*routes, *trainer_routes(sessions, settings.export)]
