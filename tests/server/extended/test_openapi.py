"""The server does what its OpenAPI document says, for requests made from it at random."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode, checks

from tests.helpers.hang import HANG_SECONDS
from tests.helpers.text_model import save_text_model
from tests.server.conftest import Live, post, run_server

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
CHANGES_STATE = (
    "/pause_generation", "/release_memory_occupation", "/begin_weight_update",
    "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc",
    "/pause", "/sleep", "/start_weight_update", "/update_weights", "/collective_rpc",
)  # fmt: skip
"""The engine may rest after one of these, whose requests are right more often than by accident."""

WAITS_FOR_OTHERS = ("/init_weights_update_group", "/init_weight_transfer_engine")
"""They connect to the address that they are given."""

bounded = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def short_model(tmp_path_factory):
    """Its context is so short that a request without limits ends soon."""
    return save_text_model(tmp_path_factory.mktemp("short-model"), max_positions=48)


@pytest.fixture(scope="module")
def live(short_model):
    with run_server(short_model, {}, {"model_name": "m", "max_batch": 8}) as live:
        yield live


@pytest.fixture(scope="module")
def document(live):
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_documented(live, document, mode):
    """For requests as the document describes them, and for those it forbids."""
    sampling = {"max_new_tokens": 8, "seed": 3, "ignore_eos": True}
    with live.client() as admin:

        def output_ids() -> list[int]:
            return post(admin, "/generate", input_ids=[5, 6], sampling_params=sampling)[
                "output_ids"
            ]

        before = output_ids()
        for operation in document.get_all_operations():
            check(operation.ok(), mode, live, admin)
        live.wait_until_idle()
        assert output_ids() == before


def check(operation: APIOperation, mode: GenerationMode, live: Live, admin: httpx.Client) -> None:
    if operation.path in WAITS_FOR_OTHERS and mode is GenerationMode.POSITIVE:
        return

    @bounded
    @given(operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=HANG_SECONDS)
        if operation.path in CHANGES_STATE:
            restore(live, admin)

    try:
        run()
    except Unsatisfiable:  # nothing is forbidden there
        assert mode is GenerationMode.NEGATIVE


def restore(live: Live, admin: httpx.Client) -> None:
    admin.post("/abandon_weight_update", json={})
    admin.post("/resume_memory_occupation", json={})
    if live.serving.loop.call(lambda engine: engine.worker.weights.serves).result(HANG_SECONDS):
        answer = admin.post("/continue_generation", json={})
    else:
        own = {"model_path": live.serving.model_path}
        answer = admin.post("/update_weights_from_disk", json=own)
        admin.post("/continue_generation", json={})
    assert answer.json()["success"], answer.text
    reason = live.serving.loop.call(lambda engine: engine.unavailable_reason)
    assert reason.result(HANG_SECONDS) == ""
