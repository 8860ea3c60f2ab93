"""The policy of `gateway.policy` for agents, over vLLM servers."""

import contextlib

from fastapi import APIRouter

from rlhf_triton.actor.capture.app import add_trainer_routes, capture_router
from rlhf_triton.actor.capture.sessions import Sessions
from rlhf_triton.actor.capture.vllm import VllmSampler
from rlhf_triton.checkpoints.tokenization import load_tokenizer, special_tokens_in
from rlhf_triton.config.sections import ServedPolicySection


def policy_router(settings: ServedPolicySection, closing: contextlib.AsyncExitStack) -> APIRouter:
    """Return the routes of sessions; `closing` receives their connections. Raises RlhfError, OSError for a folder."""
    if settings.export is not None:
        settings.export.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(settings.model)
    special = special_tokens_in(settings.model)
    sampler = VllmSampler(
        settings.servers, eos_ids=special.eos_ids, banned_ids=special.banned_ids, deadline_s=settings.deadline_s
    )
    closing.push_async_callback(sampler.close)
    sessions = Sessions(
        tokenizer, most=settings.max_sessions, most_tokens=settings.max_session_tokens, idle_s=settings.idle_s
    )
    router = capture_router(sessions, sampler, model=settings.model.name, max_tokens=settings.max_tokens)
    add_trainer_routes(router, sessions, settings.export)
    return router
