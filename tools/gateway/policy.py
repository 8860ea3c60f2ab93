"""The policy of `gateway.policy` for agents, over vLLM servers."""

import contextlib

from fastapi import APIRouter

from actor.capture.app import add_trainer_routes, capture_router
from actor.capture.sessions import Sessions
from actor.capture.vllm import VllmSampler
from python_backend.checkpoints.tokenization import end_of_sequence, load_tokenizer, special_tokens
from python_backend.config.sections import ServedPolicySection


def policy_router(settings: ServedPolicySection, closing: contextlib.AsyncExitStack) -> APIRouter:
    """Return the routes of sessions; `closing` receives their connections. Raises RlhfError, OSError for a folder."""
    if settings.export is not None:
        settings.export.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(settings.model)
    eos_ids = special_tokens(tokenizer, end_of_sequence(settings.model)).eos_ids
    sampler = VllmSampler(settings.servers, eos_ids=eos_ids, deadline_s=settings.deadline_s)
    closing.push_async_callback(sampler.close)
    sessions = Sessions(
        tokenizer, most=settings.max_sessions, most_tokens=settings.max_session_tokens, idle_s=settings.idle_s
    )
    router = capture_router(sessions, sampler, model=settings.model.name, max_tokens=settings.max_tokens)
    add_trainer_routes(router, sessions, settings.export)
    return router
