"""Every operation with a scoped key: what is not named is refused, and what is named reaches its own job's rollouts only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping

import aiohttp
import msgspec
import pytest

from dsec import Conflict, DSecClient, InvalidRequest, NotFound, PermissionDenied
from dsec.apiserver.routes import OPERATIONS, SCOPED, SOCKETS, STREAM_PATH
from dsec.edge.scopes import OF_SANDBOXES, Guard, Owned
from dsec.iam.scoped import Claims, Signer
from dsec.protocol.errors import ErrorKind
from dsec.protocol.link import Call, Handler
from dsec.protocol.rollouts import JobState
from dsec.protocol.scopes import Right, Scope
from dsec.protocol.specs import DSecContainerRunArgs, Network
from dsec.rollout.jobs import Job, JobRecord

from .fake_edge import Box
from .inert_edge import InertEdge, _rollout
from .serving import KEY, apiserver

JOB, OTHER, ENDED = "jb-fake-000000000000", "jb-fake-111111111111", "jb-fake-222222222222"
MINE = "sb-fake-000000000001"
FOREIGN = {  # what no key of JOB for a/* may reach
    "another job's": "sb-fake-000000000002",
    "another rollout's": "sb-fake-000000000003",
    "nobody's": "sb-fake-000000000004",
    "not there": "sb-fake-000000000005",
}
OWNED = {
    MINE: Owned(JOB, "a/1"),
    FOREIGN["another job's"]: Owned(OTHER, "a/1"),
    FOREIGN["another rollout's"]: Owned(JOB, "b/1"),
    FOREIGN["nobody's"]: Owned("", ""),
}
MY_ROLLOUT = "ro-fake-000000000001"
FOREIGN_ROLLOUTS = {
    "another job's": "ro-fake-000000000002",
    "another rollout's": "ro-fake-000000000003",
    "not there": "ro-fake-000000000005",
}
ROLLOUTS = {
    MY_ROLLOUT: Owned(JOB, "a/1"),
    FOREIGN_ROLLOUTS["another job's"]: Owned(OTHER, "a/1"),
    FOREIGN_ROLLOUTS["another rollout's"]: Owned(JOB, "b/1"),
}

# The operations that a scoped key is good for, said once more: a new one must be added here too, by somebody who thought of it.
OF_A_KEY = {
    "POST /exec", "GET /files", "PUT /files", "DELETE /files", "GET /files/stat", "GET /files/list", "GET /files/watch",
    "POST /files/move", "POST /files/mkdir", "GET /files/archive", "PUT /files/archive", "POST /processes", "GET /processes",
    "GET /processes/{exec_id}", "POST /processes/{exec_id}/wait",
    "POST /processes/{exec_id}/signal", "POST /processes/{exec_id}/resize",
    "POST /processes/{exec_id}/stdin", "POST /sessions", "GET /sessions", "DELETE /sessions/{name}",
    "POST /sessions/{name}/interrupt", "GET ", "DELETE ", "POST /pause", "POST /resume", "POST /network", "POST /changes",
    "GET /logs",
}  # fmt: skip
OF_ROLLOUTS = {
    "GET /v1/rollouts/{rollout}", "GET /v1/rollouts/{rollout}/steps", "GET /v1/rollouts/{rollout}/blobs/{digest}",
    "POST /v1/rollouts/{rollout}/finish",
}  # fmt: skip
OF_ITS_BODY = {"POST /v1/rollouts", "POST /v1/keys", "POST /v1/grade"}
OF_ITS_ID = {"GET /v1/grade/{grade}"}
OF_ANY_KEY = {"GET /v1/capabilities", "GET /healthz", "GET /openapi.json"}
_SANDBOX = "/v1/sandboxes/{id}"


class Owners:
    def of_sandbox(self, sandbox: str) -> Owned | None:
        return OWNED.get(sandbox)

    def of_rollout(self, rollout: str) -> Owned | None:
        return ROLLOUTS.get(rollout)

    def named(self, job: str) -> str:
        return {"mine": JOB, "other": OTHER, "ended": ENDED}.get(job, "")

    def job_runs(self, job: str) -> bool:
        return job in (JOB, OTHER)


class _Rules(msgspec.Struct):
    rules: dict[str, bool]


class _Seen(msgspec.Struct):
    scope: Scope | None = None


class GuardedEdge(InertEdge):
    """With the real edge's guard. `scopes`: of each request that came, allowed or not."""

    def _handlers(self) -> dict[str, Handler]:
        self.scopes: list[tuple[str, Scope | None]] = []
        return {method: self._seen(handler) for method, handler in Guard(Owners()).over(super()._handlers()).items()}

    def _seen(self, handler: Handler) -> Handler:
        async def seen(call: Call) -> object:
            if call.method != "edge.status":
                self.scopes.append((call.method, call.params(_Seen).scope))
            return await handler(call)

        return seen

    async def rollout_info(self, call: Call) -> object:
        return _rollout("mine", "a/1")

    rollout_finish = rollout_info

    async def sandbox_network(self, call: Call) -> object:
        return Network(mode="proxy", rules=call.params(_Rules).rules, enforced={})

    def revive(self) -> None:
        for sandbox in OWNED:
            root = self.directory / sandbox
            root.mkdir(exist_ok=True)
            self.boxes[sandbox] = Box(sandbox, DSecContainerRunArgs("debian@12"), root)


@pytest.fixture(scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[GuardedEdge, str]]:
    directory = tmp_path_factory.mktemp("guarded")
    async with GuardedEdge(directory) as edge, apiserver(directory, edge) as url:
        yield edge, url


def key(*, job: str = JOB, may: tuple[Right, ...] = tuple(Right)) -> dict[str, str]:
    claims = Claims(key="ky-test", job=job, name="mine", rollouts=("a/*",), may=may, until=time.time() + 600)
    return {"Authorization": f"Bearer {Signer(KEY.encode()).sign(claims)}"}


_VALUES = {
    "rollout": "ro-fake-000000000000",
    "digest": "0",
    "exec_id": "x",
    "name": "x",
    "port": "80",
    "connection": "1",
    "ref": "x@1",
    "grade": "x",
}


def path_of(template: str, sandbox: str = MINE, rollout: str = MY_ROLLOUT) -> str:
    found = template.replace("{ref:path}", "{ref}").replace("{id}", sandbox).replace("{rollout}", rollout)
    for name, value in _VALUES.items():
        found = found.replace(f"{{{name}}}", value)
    return found


class Asked(msgspec.Struct):
    status: int
    kind: str
    message: str


async def ask(
    url: str, method: str, path: str, headers: Mapping[str, str], body: dict[str, object] | None = None
) -> Asked:
    query = "?path=/x" if "/files" in path else ""
    for end, usual in {"/network": {"rules": {"pypi": False}}, "/finish": {"epoch": 1}}.items():
        body = body or (usual if path.endswith(end) else None)
    timeout = aiohttp.ClientTimeout(total=10)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, url + path + query, json=body, headers=headers) as answer,
    ):
        if answer.status < 300:
            return Asked(answer.status, "", "")
        error = (await answer.json())["error"]
        return Asked(answer.status, error["kind"], error["message"])


async def connect(url: str, path: str, headers: Mapping[str, str]) -> int:
    """Of a WebSocket: the status with which it was refused, 101 when it was not."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        try:
            async with session.ws_connect(url + path, headers=headers):
                return 101
        except aiohttp.WSServerHandshakeError as refused:
            return refused.status


WAYS = {"the short way": {}, "the long way": {"Expect": "100-continue"}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: f"{op.method} {op.path}")
async def test_every_operation(guarded: tuple[GuardedEdge, str], operation: object, way: str) -> None:
    edge, url = guarded
    method, template = operation.method, operation.path  # type: ignore[attr-defined]
    name = f"{method} {template.removeprefix(_SANDBOX)}" if template.startswith(_SANDBOX) else f"{method} {template}"
    edge.revive()
    edge.scopes.clear()
    got = await ask(url, method, path_of(template), {**key(), **WAYS[way]})
    if name in OF_ANY_KEY:
        assert got.status == 200
    elif name in OF_A_KEY:
        assert (got.kind, got.status) != (ErrorKind.PERMISSION.value, 403), got
        for what, sandbox in FOREIGN.items():
            refused = await ask(url, method, path_of(template, sandbox), {**key(), **WAYS[way]})
            _of_another(refused, what)
        told = await ask(url, method, path_of(template), {**key(may=(Right.GRADE,)), **WAYS[way]})
        assert told.kind == "permission" and "'use'" in told.message
        over = await ask(url, method, path_of(template), {**key(job=ENDED), **WAYS[way]})
        assert over.kind in ("permission", "invalid_request") and (over.status == 400 or "has ended" in over.message)
    elif name in OF_ROLLOUTS:
        assert got.kind != "permission", got
        for what, rollout in FOREIGN_ROLLOUTS.items():
            _of_another(await ask(url, method, path_of(template, rollout=rollout), {**key(), **WAYS[way]}), what)
        assert (await ask(url, method, path_of(template), key(may=(Right.CREATE,)))).kind == "permission"
        assert "has ended" in (await ask(url, method, path_of(template), key(job=ENDED))).message
    elif name in OF_ITS_ID:
        assert got.kind == "not_found", "no grade of its own"
        assert (await ask(url, method, path_of(template), key(may=(Right.USE,)))).kind == "permission"
    elif name in OF_ITS_BODY:
        assert got.kind == "invalid_request", "looked at below"
    else:
        assert got.kind == "permission" and "this operation" in got.message, got
        assert not edge.scopes, "it got through to the edge"
    assert all(scope is not None and scope.key == "ky-test" for _, scope in edge.scopes), edge.scopes


def _of_another(refused: Asked, what: str) -> None:
    """Nothing is learned of it. A body that is wrong in itself may be refused first."""
    if refused.kind != "invalid_request":
        assert refused.kind == "permission" and "none of those that the key is for" in refused.message, (what, refused)


@pytest.mark.parametrize("template", [STREAM_PATH, *(one.path for one in SOCKETS)])
async def test_every_socket(guarded: tuple[GuardedEdge, str], template: str) -> None:
    edge, url = guarded
    edge.revive()
    edge.scopes.clear()
    assert await connect(url, path_of(template), key()) != 403
    for sandbox in FOREIGN.values():
        assert await connect(url, path_of(template, sandbox), key()) == 403
    assert await connect(url, path_of(template), key(may=(Right.GRADE,))) == 403
    assert edge.scopes and all(scope is not None for _, scope in edge.scopes)


def test_the_table_says_the_same() -> None:
    said = OF_A_KEY | OF_ROLLOUTS | OF_ITS_BODY | OF_ITS_ID | OF_ANY_KEY
    named = {op.handler for op in OPERATIONS if f"{op.method} {op.path.removeprefix(_SANDBOX)}" in said}
    sockets = {handler for handler in SCOPED if handler not in {op.handler for op in OPERATIONS}}
    assert set(SCOPED) - sockets == named and len(named) == len(said)
    assert len(sockets) == 1 + len(SOCKETS)


async def test_network_rules_are_bounded(guarded: tuple[GuardedEdge, str]) -> None:
    edge, url = guarded
    edge.revive()
    got = await ask(url, "POST", path_of(f"{_SANDBOX}/network"), key(), {"rules": {"pypi": True}})
    assert got.kind == "permission" and "pypi" in got.message


async def test_the_owner_is_not_scoped(guarded: tuple[GuardedEdge, str]) -> None:
    edge, url = guarded
    edge.revive()
    edge.scopes.clear()
    owner = {"Authorization": f"Bearer {KEY}"}
    assert (await ask(url, "GET", path_of(_SANDBOX, FOREIGN["another job's"]), owner)).status == 200
    assert edge.scopes == [("sandbox.info", None)]
    inside = await ask(url, "GET", path_of(_SANDBOX), {**owner, "X-DSec-Inside": "1"})
    assert inside.kind == "permission" and "from inside a sandbox" in inside.message


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"job": "mine", "name": "a/9"}, ""),
        ({"job": "mine", "name": "b/1"}, "permission"),
        ({"job": "other", "name": "a/9"}, "permission"),
        ({"job": "nowhere", "name": "a/9"}, "permission"),
        ({"job": "", "name": "a/9"}, "permission"),
    ],
    ids=str,
)
async def test_opening_a_rollout(guarded: tuple[GuardedEdge, str], body: dict[str, object], kind: str) -> None:
    edge, url = guarded
    edge.scopes.clear()
    got = await ask(url, "POST", "/v1/rollouts", key(), body)
    assert got.kind == kind, got
    assert all(scope is not None for _, scope in edge.scopes)


@pytest.mark.parametrize("sandbox", FOREIGN)
async def test_grading(guarded: tuple[GuardedEdge, str], sandbox: str) -> None:
    """Whose changes count is asked of the edge first; the grade itself is the platform's."""
    edge, url = guarded
    edge.revive()
    body = {"args": {"container_image": "debian@12"}, "tests": "tests@1", "source": {"sandbox": FOREIGN[sandbox]}}
    refused = await ask(url, "POST", "/v1/grade", key(may=(Right.GRADE,)), body)
    assert refused.kind == "permission" and "none of those" in refused.message
    own = {**body, "source": {"sandbox": MINE}, "wait_s": 0, "grade_id": f"g-{sandbox.replace(' ', '')[:4]}"}
    assert (await ask(url, "POST", "/v1/grade", key(may=(Right.USE,)), own)).kind == "permission"
    assert (await ask(url, "POST", "/v1/grade", key(may=(Right.GRADE,)), own)).kind != "permission"
    found = await ask(url, "GET", f"/v1/grade/{own['grade_id']}", {"Authorization": f"Bearer {KEY}"})
    assert found.kind == "not_found", "its ids are its own"


LESS = {"job": "mine", "rollouts": ["a/1"], "may": ["use"]}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (LESS, ""),
        ({**LESS, "rollouts": ["a/*"]}, ""),
        ({**LESS, "rollouts": None}, "permission"),
        ({**LESS, "rollouts": ["b/1"]}, "permission"),
        ({**LESS, "may": ["use", "create"]}, "permission"),
        ({**LESS, "network": ["pypi"]}, "permission"),
        ({**LESS, "ttl_s": 86400}, "permission"),
        ({**LESS, "job": "other"}, "permission"),
        ({**LESS, "job": "nowhere"}, "permission"),
        ({**LESS, "may": []}, "invalid_request"),
        ({**LESS, "may": ["everything"]}, "invalid_request"),
        ({**LESS, "nosuch": 1}, "invalid_request"),
    ],
    ids=str,
)
async def test_making_a_key_with_a_key(guarded: tuple[GuardedEdge, str], body: dict[str, object], kind: str) -> None:
    edge, url = guarded
    edge.scopes.clear()
    got = await ask(url, "POST", "/v1/keys", key(may=(Right.USE,)), body)
    assert got.kind == kind, got
    assert not edge.scopes, "whoever may ask about one job is told nothing of others"


async def test_making_a_key_as_the_owner(guarded: tuple[GuardedEdge, str]) -> None:
    edge, url = guarded
    edge.jobs["mine"] = Job(JobRecord(id=JOB, name="mine", created_at=0.0, lease=60), 0.0)
    edge.jobs["over"] = Job(JobRecord(id=ENDED, name="over", created_at=0.0, lease=60, state=JobState.STOPPED), 0.0)
    async with DSecClient(url, KEY) as client:
        made = await client.keys.create("mine", rollouts="a/*", may=("use", "create"), ttl=60, note="for one worker")
        assert made.job == "mine" and made.rollouts == ("a/*",) and 0 < made.expires_at - time.time() <= 60
        assert made.key not in repr(made)
        async with DSecClient(url, made.key) as holder:
            less = await holder.keys.create("mine", rollouts=("a/1",))
            assert less.expires_at <= made.expires_at
            with pytest.raises(PermissionDenied):
                await holder.keys.create("mine")
        for job, refusal in {"over": Conflict, "nowhere": NotFound}.items():
            with pytest.raises(refusal):
                await client.keys.create(job)
        with pytest.raises(InvalidRequest, match="rights"):
            await client.keys.create("mine", may=("everything",))


def test_the_guard_lets_through_only_what_is_named() -> None:
    assert not {method for method in OF_SANDBOXES if method.startswith(("layers.", "edge.", "job.", "sandbox.create"))}
    assert not OF_SANDBOXES & {"sandbox.list", "sandbox.stop_many", "sandbox.stop_burst", "sandbox.ttl"}
