"""Composition: order and kinds are checked, defaults merge, references resolve to digests."""

from __future__ import annotations

import pytest

from dsec.layers import Config, LayerStore, compose
from dsec.layers.compose import MAX_LAYERS
from dsec.protocol.errors import ErrorKind, Fault
from tests.layers.conftest import Tiny


@pytest.fixture
def stocked(tiny: Tiny, store: LayerStore) -> LayerStore:
    tiny("debian@12", config=Config(env={"PATH": "/bin", "LANG": "C"}, workdir="/", user="root"))
    for name in ("work@1", "work@2"):
        tiny(name, kind="workspace", config=Config(env={"LANG": "de"}, workdir="/work"))
    tiny("tool@1", kind="toolkit", config=Config(env={"PATH": "/opt/tool/bin:${PATH}", "TOOL": "${TOOL}x${LANG}"}))
    tiny("tool@2", kind="toolkit", config=Config(user="agent"))
    return store


def test_defaults_merge_upwards(stocked: LayerStore) -> None:
    environment = compose(stocked, "debian@12", ("work@1", "tool@1", "tool@2"))
    assert environment.env == {"PATH": "/opt/tool/bin:/bin", "LANG": "de", "TOOL": "x${LANG}"}
    assert (environment.workdir, environment.user) == ("/work", "agent")
    assert [str(layer) for layer in environment.layers] == ["debian@12", "work@1", "tool@1", "tool@2"]


def test_references_are_pinned_and_compose_the_same(stocked: LayerStore) -> None:
    environment = compose(stocked, "debian", ("work@2", "tool@1"))
    base, *layers = environment.refs()
    assert base == f"debian@{stocked.resolve('debian@12').digest}"
    assert compose(stocked, base, tuple(layers)) == environment


def test_the_base_has_a_default(stocked: LayerStore) -> None:
    assert compose(stocked, None).refs() == compose(stocked, "debian@12").refs()


def test_a_path_without_a_base_path_keeps_the_usual_directories(tiny: Tiny, store: LayerStore) -> None:
    tiny("bare@1")
    tiny("tool@1", kind="toolkit", config=Config(env={"PATH": "/opt/x:${PATH}"}))
    assert (
        compose(store, "bare@1", ("tool@1",)).env["PATH"]
        == "/opt/x:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )


@pytest.mark.parametrize(
    ("base", "layers", "says"),
    [
        ("work@1", (), "work@1 is a workspace, not a base"),
        ("debian@12", ("debian@12",), "debian@12 is a base"),
        ("debian@12", ("tool@1", "work@1"), "workspace work@1 comes after toolkit tool@1"),
        ("debian@12", ("work@1", "work@1"), "work@1 is there twice"),
        ("debian@12", ("work@1", "work@2", "work@1"), "work@1 is there twice"),
        ("debian@12", ("work",), "several versions"),
        ("debian@12", ("../etc",), "not a layer reference"),
        ("", (), "not a layer reference"),
    ],
)
def test_wrong_stacks_say_what_is_wrong(stocked: LayerStore, base: str, layers: tuple[str, ...], says: str) -> None:
    with pytest.raises(Fault) as caught:
        compose(stocked, base, layers)
    assert caught.value.body.kind is ErrorKind.INVALID
    assert says in caught.value.body.message and caught.value.body.hint


def test_too_many_layers(stocked: LayerStore) -> None:
    with pytest.raises(Fault) as caught:
        compose(stocked, "debian@12", tuple(f"tool@{number}" for number in range(MAX_LAYERS)))
    assert caught.value.body.kind is ErrorKind.INVALID and caught.value.body.details["limit"] == MAX_LAYERS


def test_an_unknown_layer(stocked: LayerStore) -> None:
    with pytest.raises(Fault) as caught:
        compose(stocked, "debian@12", ("tool@9",))
    assert caught.value.body.kind is ErrorKind.NOT_FOUND and "tool@1" in caught.value.body.hint
