"""Whatever is sent to any documented operation is answered as the document says: no defect shows, and no shape differs.

The operations come from the table that the router is made from, so a new one is covered as soon as it is there.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from dsec.apiserver.openapi import document

from .inert_edge import InertEdge
from .schema_checks import CHECKS, aimed
from .serving import KEY, apiserver

SCHEMA = schemathesis.openapi.from_dict(json.loads(document("0")))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An apiserver over an inert edge, whose loop runs beside the tests, since they wait for answers without one."""
    directory = tmp_path_factory.mktemp("inert")
    url: Future[str] = Future()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with InertEdge(directory) as edge, apiserver(directory, edge) as address:
            url.set_result(address)
            await stop.wait()

    ended: Future[None] = Future()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:  # noqa: BLE001 - the thread's outermost; told below
            ended.set_exception(error)
        else:
            ended.set_result(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait([url, ended], timeout=30, return_when=FIRST_COMPLETED)
        if ended.done():
            ended.result()
        yield url.result(0)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        ended.result()  # the log of the apiserver held no traceback


@SCHEMA.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_every_operation_answers_as_documented(case: schemathesis.Case, served: str) -> None:
    for one in aimed(case):
        response = one.call(base_url=served, headers={"Authorization": f"Bearer {KEY}"}, timeout=20)
        one.validate_response(response, checks=CHECKS)
