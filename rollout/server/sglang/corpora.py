"""External corpora over HTTP: texts to draft from beside the rollouts themselves."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.exceptions import HTTPException

from rollout.engine.draft_corpus import ExternalCorpus, ExternalState
from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.server.allowed_paths import AllowedPaths
from rollout.server.body_fields import CHANGED, Body, Listed
from rollout.server.errors import DrainingError
from rollout.server.json_route import JsonAnswer, JsonRoute, json_body, openapi_body
from rollout.server.serving import Serving
from rollout.server.sglang.control import Answer, RefusedError, attempt, change, success

_POLL_SECONDS = (0.005, 0.25)  # the first pause, and the longest


class AddBody(Body):
    """Exactly one source. ``wait``: answer when the corpus is drafted from, or has failed."""

    corpus_id: str | None = Field(None, min_length=1, max_length=200)
    file_path: str | None = None
    documents: Listed[str] | None = None
    token_chunks: Listed[Listed[int]] | None = None
    wait: bool = True


class RemoveBody(Body):
    corpus_id: str


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["corpora"], route_class=JsonRoute)
    configured = serving.config.corpora_root
    root = AllowedPaths("server.corpora_root", [] if configured is None else [configured])

    async def loaded(corpus_id: str) -> ExternalCorpus:
        """Wait until drafts are made from the corpus. Generation goes on meanwhile."""
        pause = _POLL_SECONDS[0]
        while True:
            corpus = await attempt(serving, lambda engine: _loaded_or_loading(engine, corpus_id))
            if corpus.state is ExternalState.PUBLISHED:
                return corpus
            if serving.is_draining:
                raise DrainingError("the server is shutting down: the load ends with it")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    @router.post("/add_external_corpus", openapi_extra=openapi_body(AddBody), responses=CHANGED)
    async def add_external_corpus(request: Request) -> JsonAnswer:
        """Load a corpus in the background, beside generation and beside other loads.

        409 for an id that is taken; 400 for a corpus that cannot be loaded, which is dropped.
        """
        body = await json_body(request, AddBody)

        def add(engine: Engine) -> str:
            taken = _by_name(engine).get(body.corpus_id or "")
            if taken is not None and taken.state is not ExternalState.FAILED:
                raise HTTPException(409, f"{body.corpus_id!r} is taken: remove that corpus first")
            path = None if body.file_path is None else root.file("file_path", body.file_path)
            return engine.add_external_corpus(
                body.corpus_id,
                documents=body.documents,
                token_chunks=body.token_chunks,
                file_path=path,
            )

        try:
            name = await attempt(serving, add)
            if not body.wait:
                return success("loading", corpus_id=name, loaded_token_count=0)
            count = (await loaded(name)).num_tokens
            return success("loaded", corpus_id=name, loaded_token_count=count)
        except RefusedError as refused:
            return refused.response

    @router.post("/remove_external_corpus", responses=CHANGED)
    async def remove_external_corpus(body: RemoveBody) -> JsonAnswer:
        """Forget a corpus, or cancel its load. 404 for an unknown one."""

        def remove(engine: Engine) -> Answer:
            found = _by_name(engine)
            if body.corpus_id not in found:
                known = ", ".join(found) or "none"
                raise HTTPException(404, f"{body.corpus_id!r} is no corpus; there are: {known}")
            engine.remove_external_corpus(body.corpus_id)
            return {"message": f"removed {body.corpus_id}"}

        return await change(serving, remove)

    @router.get("/list_external_corpora", responses=CHANGED)
    async def list_external_corpora() -> JsonAnswer:
        def listed(engine: Engine) -> Answer:
            corpora = engine.external_corpora()
            return {
                "corpus_token_counts": {
                    corpus.name: corpus.num_tokens
                    for corpus in corpora
                    if corpus.state is ExternalState.PUBLISHED
                },
                "corpora": [_described(corpus) for corpus in corpora],
            }

        return await change(serving, listed)

    return router


def _by_name(engine: Engine) -> dict[str, ExternalCorpus]:
    return {corpus.name: corpus for corpus in engine.external_corpora()}


def _loaded_or_loading(engine: Engine, name: str) -> ExternalCorpus:
    corpus = _by_name(engine).get(name)
    if corpus is None:
        raise HTTPException(409, f"{name!r} was removed while it loaded")
    if corpus.state is ExternalState.FAILED:
        engine.remove_external_corpus(name)
        raise InvalidInputError("corpus_id", name, f"could not be loaded: {corpus.error}")
    return corpus


def _described(corpus: ExternalCorpus) -> Answer:
    return {
        "corpus_id": corpus.name,
        "state": corpus.state.value,
        "num_tokens": corpus.num_tokens,
        "num_bytes": corpus.num_bytes,
        "progress": corpus.progress,
        "error": corpus.error,
    }
