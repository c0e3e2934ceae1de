"""What watches the code under test from inside its own process.

Everything here lives in closures and in the frame of one generator, takes every builtin it needs beforehand, and is named by
nothing that code under test can reach without an audited call. What it finds fatal ends the process at once: results of a
process that has been tampered with are worth nothing, and the parent counts what is missing as missing.

Three rules hold together (docs/security.md says what they do not hold):
- an end of a test counts only when the frame of that very test, in its own module, reaches it;
- values are compared with strangers before they are compared with what a test expects;
- functions that tests, pytest and the comparison itself consist of are still those that the parent saw.
"""

from __future__ import annotations

import os
import sys
import types
from _blake2 import blake2s as _blake
from _thread import get_ident as _ident
from collections.abc import Callable, Iterable
from functools import partial as _partial
from itertools import chain as _chain
from marshal import dumps as _dumps
from operator import is_ as _is
from time import monotonic as _clock
from typing import Any, NamedTuple

from .scales import make_weigh
from .start import NAME

TAMPERED = 97
"""Exit status of a child that stopped itself."""

Where = Any  # a frame, as the interpreter hands it out
Thing = Any  # whatever tests and the code under test hand around


class Terrain(NamedTuple):
    """Which files are whose. Paths are absolute; changed: None when nobody said what the agent changed."""

    workdir: str
    trusted: tuple[str, ...]  # prefixes: the standard library, installed packages, the tests
    stdlib: str
    tests: frozenset[str]
    changed: frozenset[str] | None
    allow: frozenset[str]
    program: str  # the runner's own file
    uid: int  # whom the tests run as
    climbs: (
        bool  # whether any changed file has the words by which one gets from a frame to others and to what they hold
    )


class Guard(NamedTuple):
    """check, weigh, settled, text: see there. load: compiles a marked tree. install: from here on the hook watches (for good)."""

    check: Callable[[], None]
    weigh: Callable[[str, Any, Any], None]
    load: Callable[..., types.CodeType]
    watch: Callable[[str, Any, Iterable[str], bool, bool], None]
    install: Callable[[], None]
    settled: Callable[..., None]
    begin: Callable[[Thing], None]
    collected: Callable[[Thing], None]
    text: Callable[[Thing], Thing]


def _lost() -> type[BaseException]:
    """What `pytest.fail` raises."""
    from _pytest.outcomes import Failed

    return Failed


def make_guard(
    descriptor: int, terrain: Terrain, secrets: dict[int, bytes], hidden: dict[Any, Any] | None = None
) -> Guard:
    """secrets: what the end of each marked test says, by its index. hidden: texts of test files that the
    tests' user cannot read, and marked trees. Both are emptied here: only frames of generators know them then."""
    # every name below is a local of this function: nothing is looked up where it could have been changed
    write, leave, getframe, is_ = os.write, os._exit, sys._getframe, _is
    all_, map_, zip_, len_, isinstance_, type_ = all, map, zip, len, isinstance, type
    tuple_, set_, list_, dict_, str_, bytes_, int_ = tuple, set, list, dict, str, bytes, int
    frozenset_, object_ = frozenset, object
    anything, ident, globals_ = Exception, _ident, globals
    function, method, builtin, code_of = types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.CodeType
    module, bag, wrapper = types.ModuleType, types.SimpleNamespace, type(object.__eq__)
    classmethod_, staticmethod_, property_, mro = classmethod, staticmethod, property, type.__dict__["__mro__"].__get__
    vars_of = type.__dict__["__dict__"].__get__
    realpath, basename, fsdecode, join = os.path.realpath, os.path.basename, os.fsdecode, os.path.join
    tampered = TAMPERED
    ours = frozenset_((NAME, terrain.program))
    enforce, climbs = terrain.changed is not None, terrain.climbs
    dynamic = frozenset_(
        ("getattr", "attrgetter", "vars", "eval", "exec", "__getattribute__", "f_back", "f_locals", "f_globals")
    )
    walked = frozenset_((list_, tuple_, set_, frozenset_, dict_))
    changed: frozenset[Thing] = terrain.changed or frozenset_()
    workdir, stdlib, allow, trusted = terrain.workdir + "/", terrain.stdlib, terrain.allow, terrain.trusted
    test_files, test_names = terrain.tests, frozenset_(basename(path) for path in terrain.tests)
    lookers = frozenset_(join(stdlib, name) for name in ("inspect.py", "dis.py", "operator.py", "functools.py"))
    native = (join(stdlib, "ctypes") + "/",)
    lenders = tuple_(
        join(stdlib, name)
        for name in ("code.py", "codeop.py", "runpy.py", "importlib/", "py_compile.py", "zipimport.py")
    )
    open_, fstat, lstat, uid = open, os.fstat, os.lstat, terrain.uid
    quoting = join(stdlib, "traceback.py")
    busy: set[int] = set_()
    verdicts: dict[str, bool] = dict_()
    watched: list[Any] = list_()
    rarely: list[Any] = list_()
    sealed: dict[str, Any] = dict_()
    seen: set[str] = set_()
    loaded: set[str] = set_()
    marks: dict[str, Callable[..., object]] = dict_()
    forking: list[Where] = list_()
    copied: list[Where] = list_()
    used: dict[str, set[str]] = dict_()
    classes: dict[Any, Any] = dict_()
    of_class: list[Any] = list_()
    known = frozenset_(__builtins__ if isinstance_(__builtins__, dict_) else vars(__builtins__))  # type: ignore[arg-type]
    protected: set[Any] = set_()
    current: list[Thing] = list_()
    params: dict[Thing, Thing] = dict_()
    blake, compile_, partial, getattr_, chain = _blake, compile, _partial, getattr, _chain
    data: list[Thing] = list_()
    dumps, modules, identity = _dumps, sys.modules, id
    clock, looked, lost = _clock, [0.0, 0.0], _lost()
    main, empty = _ident(), dict[str, object]()
    keep: Thing = (tuple(secrets.items()), dict_())  # handed to the generator, then forgotten

    def tell(kind: bytes, name: str, detail: str) -> None:
        text = (name + "\t" + detail[:600]).replace("\n", " ").encode("utf-8", "replace")
        write(descriptor, kind + text + b"\n")

    def fatal(name: str, detail: str) -> None:
        try:
            tell(b"X", name, detail)
        finally:
            leave(tampered)

    def strange(path: str) -> bool:
        """Whether code of this file may be the agent's. What it wrote while it ran is, too: that is the tests' user's."""
        known = verdicts.get(path)
        if known is None:
            if path in ours or path.startswith("<frozen "):
                known = False
            elif path in changed or not path.endswith(".py") or not was_there(path):
                known = True  # what no file has was made at run time: templates, say
            else:
                known = not (path.startswith(trusted) or (enforce and path.startswith(workdir)))
            verdicts[path] = known
        return known

    def was_there(path: str) -> bool:
        try:
            return lstat(path).st_uid != uid
        except anything:
            return False

    def beyond_stdlib(frame: Where) -> Where:
        """The first frame that is not of the standard library or the import system: on whose behalf those act."""
        while frame is not None:
            name = frame.f_code.co_filename
            if name[:8] != "<frozen " and (strange(name) or not name.startswith(stdlib)):
                break
            frame = frame.f_back
        return frame

    # forks ----------------------------------------------------------------------------------------------------------

    def on_fork(event: str, args: Thing, frame: Where) -> None:
        """A copy that the agent's code makes of this process is its own: it learns nothing of how a test goes on."""
        forking.clear()
        frame = beyond_stdlib(frame)
        if frame is None or not strange(frame.f_code.co_filename):
            return
        while frame is not None:
            if strange(frame.f_code.co_filename):
                forking[:] = [frame]  # the outermost one is kept: where the agent's code was entered
            frame = frame.f_back

    def returned() -> None:
        """In such a copy: ends it when the agent's code has gone back to who called it, whatever it then were to find."""
        if copied:
            frame: Where = getframe(1)
            while frame is not None:
                if frame is copied[0]:
                    return
                frame = frame.f_back
            leave(tampered)

    def enter() -> None:
        """The first thing a test does: nobody but pytest calls it."""
        returned()
        alone()

    def alone() -> None:
        me = ident()
        busy.add(me)  # each look at a frame's code is an audited event
        frame: Where = getframe(2)
        while enforce and "wraps" not in allow and (frame := frame.f_back) is not None:
            if strange(frame.f_code.co_filename):
                fatal("forged_end", f"a test was called by {frame.f_code.co_filename}:{frame.f_lineno}")
        busy.discard(me)

    def sign(data: bytes, key: bytes) -> Thing:
        return blake(data, key=key, digest_size=8).hexdigest().encode()

    # the end of a test ----------------------------------------------------------------------------------------------

    def ender(pairs: Thing, codes: Thing) -> Thing:
        """Runs in a frame that nothing leads to but `gi_frame`, which the hook guards. Answers nothing useful.

        What it writes holds for one end only: it is signed with a secret of the test, and counted.
        """
        keys: Thing = dict_(pairs)
        del pairs
        asked: Thing = None
        count = 0
        while True:
            asked = yield asked
            by: Where = getframe(1)
            if by.f_code is registrar:
                codes[asked[0]] = asked[1]
            elif by.f_code is finisher and by.f_back.f_globals is sealed.get(by.f_back.f_code.co_filename):
                if codes.get(by.f_back.f_code) != asked:
                    fatal("forged_end", "a test said that another one had ended")
                count += 1
                write(descriptor, b"T%d %d %b\n" % (asked, count, sign(b"%d" % count, keys[asked])))
            else:
                fatal("forged_end", "something else than a test said that a test had ended")
            asked = by = None

    def shelf(texts: Thing) -> Thing:
        """Keeps the hidden tests as `ender` keeps the secrets; gives them to `text` alone."""
        texts = dict_(texts)
        answer = None
        while True:
            asked = yield answer
            by: Where = getframe(1)
            answer = texts.get(asked) if by.f_code is librarian else None
            by = None

    def text(path: Thing) -> Thing:
        """What is hidden under that name: for pytest, which loads it or shows a failure; for nobody on behalf of the agent."""
        frame: Where = getframe(1)
        while enforce and frame is not None:
            if strange(frame.f_code.co_filename):
                return None
            frame = frame.f_back
        return lend(path)

    def end(index: int, given: Thing) -> None:
        """The last thing a test does. given: its arguments, as far as it never assigns to them."""
        frame: Where = getframe(1)
        if ident() != main:
            fatal("forged_end", "a test ended in another thread than pytest's")
        for name, value in given:
            if current and (getattr_(current[0], "funcargs", empty) or empty).get(name, value) is not value:
                fatal("forged_end", f"{frame.f_code.co_name} ran with another {name} than pytest gave it")
        alone()
        check()
        same_data()
        say(index)

    def begin(item: Thing) -> None:
        """pytest is about to run this item; what it was parametrised with must still be what it was collected with."""
        current.clear()
        current.append(item)
        cls = getattr_(item, "cls", None)
        of_class[:] = [part for one in (mro(cls) if isinstance_(cls, type_) else ()) for part in classes.get(one, ())]
        before, now = params.get(item), parameters(item)
        if before is not None and not (len_(before) == len_(now) and all_(map_(is_, before, now))):
            fatal("patched", "the parameters of a test were changed after it had been collected")
        same_data()

    def collected(items: Thing) -> None:
        check(settled=True)
        for item in items:
            params[item] = parameters(item)

    def parameters(item: Thing) -> Thing:
        return tuple_(getattr_(getattr_(item, "callspec", None), "params", empty).values())

    def load(name: str, tree: Thing, *, helper: bool = False) -> Thing:
        """Compile a marked file. A test file is loaded by pytest's own import of it, in the main thread, and once; a module that
        tests import, by whoever imports it first."""
        frame: Where = getframe(1)
        while frame is not None and not helper:
            if strange(frame.f_code.co_filename):
                fatal("imports_tests", f"{name} by {frame.f_code.co_filename}")
            frame = frame.f_back
        if not helper and (ident() != main or name in loaded):
            fatal("imports_tests", name)
        loaded.add(name)
        return embed(compile_(tree, name, "exec", dont_inherit=True))

    def embed(code: Thing) -> Thing:
        """Put the functions in the place of their names, and make the ends of tests known."""
        index, consts = -1, []
        used.setdefault(code.co_filename, set_()).update(code.co_names)
        for const in code.co_consts:
            if type_(const) is code_of:
                const = embed(const)
            elif type_(const) is str_ and const.startswith("\0dsec:end:"):
                index = int_(const[10:])
                const = partial(end, index)
            elif type_(const) is str_ and const in marks:
                const = marks[const]
            consts.append(const)
        code = code.replace(co_consts=tuple_(consts))
        if index >= 0:
            protected.add(code)
            say((code, index))
        return code

    # what must stay what it is --------------------------------------------------------------------------------------

    def watch(label: str, holder: Thing, names: Iterable[str], exact: bool, slow: bool) -> None:
        """names: of a module, class or object; what it lacks now it must lack later. exact: nobody replaces these, tests
        themselves included; else only the agent's code must not. slow: looked at after each test, not at each assert."""
        space = vars_of(holder) if isinstance_(holder, type_) else holder.__dict__
        keys = tuple_(names)
        (rarely if slow else watched).append((label, space.get, keys, tuple_(map_(space.get, keys)), exact))

    def seal(space: dict[str, Any]) -> None:
        """The functions, classes and modules that a test file consists of, when it has just been executed."""
        kinds = (function, type_, module, method, builtin)
        keys = tuple_(key for key, value in space.items() if isinstance_(value, kinds))
        name = space["__file__"]
        if getframe(1).f_globals is not space:
            fatal("forged_module", name)
        if name in sealed:  # loaded once more, under another name say: what was there first counts
            return
        sealed[name] = space
        mine = tuple_(key for key in keys if type_(space[key]) is function and space[key].__code__.co_filename == name)
        rest = tuple_(key for key in keys if key not in mine)
        watched.append((name, space.get, mine, tuple_(map_(space.get, mine)), True))
        watched.append((name, space.get, rest, tuple_(map_(space.get, rest)), False))
        absent = tuple_(key for key in used.pop(name, ()) if key in known and key not in space)
        watched.append((name, space.get, absent, (None,) * len_(absent), None))
        for value in tuple_(space.values()):
            if isinstance_(value, type_) and vars_of(value).get("__module__") == space.get("__name__"):
                classes[value] = class_parts(value)
        for key, value in space.items():
            if type_(value) in walked and value and key[:2] != "__":
                data.append((f"{name}.{key}", space, key, value, tuple_(value), frozen(value, tuple_(value))))
        look_into(space)

    def frozen(value: Thing, keys: Thing) -> Thing:
        """The contents of a container as far as they were there when keys were taken: what is appended later is no change."""
        kind = type_(value)
        if kind is dict_:
            part: Thing = tuple_((key, value[key]) for key in keys if key in value)
        elif kind is list_ or kind is tuple_:
            part = tuple_(value[: len_(keys)])
        else:
            return len_(value) >= len_(keys) and all_(key in value for key in keys)
        try:
            return dumps(part, 2)
        except anything:  # objects: the same ones
            return tuple_(map_(identity, part)) if kind is not dict_ else tuple_(identity(one) for _, one in part)

    def same_data() -> None:
        """Tables of the tests hold what they held when their module had been executed."""
        for label, space, key, value, keys, before in data:
            if space.get(key) is value and frozen(value, keys) != before and enforce and "data" not in allow:
                fatal("patched", f"{label} was changed")

    def look_into(space: Thing) -> None:
        """Modules that tests use, and that are not the agent's, hold nothing of the agent's."""
        names: set[Thing] = set_()
        for value in space.values():
            names.add(value.__name__ if type_(value) is module else getattr_(value, "__module__", None))
        me = ident()
        inner = me in busy
        busy.add(me)
        try:
            for name in names:
                holder = modules.get(name) if type_(name) is str_ else None
                file: Thing = getattr_(holder, "__file__", None)
                if not enforce or type_(holder) is not module or type_(file) is not str_ or strange(file):
                    continue
                for key, value in tuple_(holder.__dict__.items()):
                    inside = ((key, value),)
                    if isinstance_(value, type_) and value.__module__ == name:
                        inside = tuple_(vars_of(value).items())
                    for part, thing in inside:
                        if (
                            type_(thing) is function
                            and thing.__code__.co_filename in changed
                            and not file.startswith(workdir)
                        ):
                            fatal("patched", f"{name}.{key}.{part}" if part != key else f"{name}.{key}")
        finally:
            if not inner:
                busy.discard(me)

    def class_parts(one: Thing) -> Thing:
        """What a class of tests consists of, and what it inherits: neither is replaced by the agent's code."""
        space = vars_of(one)
        mine = tuple_(
            key for key, value in space.items() if type_(value) in (function, classmethod_, staticmethod_, property_)
        )
        above = {key for base in mro(one)[1:] for key in vars_of(base)}
        absent = tuple_(key for key in above if key not in space)
        return [
            (one.__qualname__, space.get, mine, tuple_(map_(space.get, mine)), False),
            (one.__qualname__, space.get, absent, (None,) * len_(absent), None),
        ]

    def owner(value: Thing, depth: int = 0) -> str:
        """Whose code a value is: "agent", "trusted", or "c" when it has none to look at."""
        kind = type_(value)
        if kind in (classmethod_, staticmethod_, method):
            return owner(value.__func__, depth + 1) if depth < 8 else "agent"
        if kind is partial:
            return owner(value.func, depth + 1) if depth < 8 else "agent"
        if kind is property_:
            return owner(value.fget, depth + 1) if depth < 8 else "agent"
        if kind is function:
            return "agent" if strange(value.__code__.co_filename) else "trusted"
        if kind is module or kind is bag:
            return "agent"
        found = "c"
        for one in mro(value if isinstance_(value, type_) else kind):
            for part in vars_of(one).values():
                if type_(part) is function:
                    if strange(part.__code__.co_filename):
                        return "agent"
                    found = "trusted"
        return found

    def check(*, settled: bool = False) -> None:
        """Before each assert and at each end; settled: after a test's teardown, when nothing may be replaced any more."""
        returned()
        for label, get, keys, values, exact in chain(watched, of_class, rarely if settled else ()):
            if all_(map_(is_, map_(get, keys), values)):
                continue
            me = ident()
            inner = me in busy
            busy.add(me)
            try:
                for key, value in zip_(keys, values):
                    now = get(key)
                    if now is value:
                        continue
                    whose = owner(now)
                    if (
                        exact is True
                        or whose == "agent"
                        or (whose == "c" and (settled or exact is None) and now is not None)
                    ):
                        fatal("patched", f"{label}.{key}")
            finally:
                if not inner:
                    busy.discard(me)

    def settled(hooks: Thing = (), *, last: bool = False) -> None:
        """After a test. hooks: lists of pytest's hook implementations, none of which may be the agent's.

        Looking at everything takes a millisecond: it is done every 20, after the first tests, and at the end.
        """
        if last:
            for space in tuple_(sealed.values()):
                look_into(space)
        same_data()
        now = clock()
        if last or now - looked[0] > 0.02 or looked[1] < 2:
            check(settled=True)
            looked[0], looked[1] = clock(), looked[1] + 1
        me = ident()
        busy.add(me)
        try:
            for impls in hooks:
                for impl in impls:
                    whose = impl.function if type_(impl.function) in (function, method) else None
                    if enforce and "plugin" not in allow and (whose is None or owner(whose) == "agent"):
                        fatal("patched", f"the agent's code is a hook of pytest: {impl.plugin_name}")
        finally:
            busy.discard(me)

    # values that lie ------------------------------------------------------------------------------------------------

    def liar_class(kind: Thing, name: str) -> bool:
        """Whether a class decides comparisons by code that may be the agent's."""
        for one in mro(kind):
            part = vars_of(one).get(name)
            if part is not None:
                if type_(part) is wrapper:
                    return False
                return (
                    owner(part) != "trusted"
                    if type_(part) is function
                    else one is not object_ and owner(one) == "agent"
                )
        return False

    def fail() -> None:
        """The end of a canary."""
        raise lost("this must fail", False)

    weigh = make_weigh(lambda kind, name: "equality" not in allow and liar_class(kind, name), tell, returned)

    def equal(left: Thing, right: Thing) -> Thing:
        weigh("==", left, right)
        return left == right

    # the audit hook -------------------------------------------------------------------------------------------------

    def acting(frame: Where, through: Thing) -> Where:
        """The first frame that is not of modules which only look on somebody's behalf."""
        while frame is not None and frame.f_code.co_filename in through:
            frame = frame.f_back
        return frame

    def in_test(frame: Where) -> bool:
        while frame is not None:
            if frame.f_code in protected:
                return True
            frame = frame.f_back
        return False

    def object_to(name: str, rule: str, frame: Where, what: str) -> None:
        """Fatal when it is known what the agent changed and the task does not allow it; else a reviewer is told, once."""
        if rule in allow:
            return
        detail = f"{what} by {frame.f_code.co_filename}:{frame.f_lineno}"
        if enforce:
            fatal(name, detail)
        mention(name, detail)

    def mention(name: str, detail: str) -> None:
        """For a reviewer, once."""
        if detail not in seen and len_(seen) < 50:
            seen.add(detail)
            tell(b"N", name, detail)

    def on_frames(event: str, args: Thing, frame: Where) -> None:
        frame = acting(frame, lookers)
        if frame is None or not strange(frame.f_code.co_filename) or not in_test(frame):
            return
        if climbs or not dynamic.isdisjoint(frame.f_code.co_names):
            object_to("reads_frames", "frames", frame, event)
        elif "frames" not in allow:  # its own frame, say, to compare codes with
            mention("reads_frames", f"{event} by {frame.f_code.co_filename}:{frame.f_lineno}")

    def on_getattr(event: str, args: Thing, frame: Where) -> None:
        what, name = args
        if what is engine or what is library:
            fatal("reads_runner", name)
        if name in ("tb_frame", "gi_frame", "cr_frame", "ag_frame"):
            on_frames(name, args, frame)
            return
        if name == "f_code":
            code = what.f_code
        elif name == "__code__" and type_(what) is function:
            code = what.__code__
        else:
            return
        if code in protected:
            frame = acting(frame, lookers)
            if frame is not None and strange(frame.f_code.co_filename):
                object_to("reads_frames", "frames", frame, name)

    def on_setattr(event: str, args: Thing, frame: Where) -> None:
        what, name = args[0], args[1]
        if name not in ("__code__", "__defaults__", "__kwdefaults__") or type_(what) is not function:
            return
        of = what.__code__.co_filename
        if name != "__code__" and of.startswith(workdir):  # copies of what a test hands over get their defaults so
            return
        if strange(frame.f_code.co_filename) and not strange(of):
            object_to("patched", "patch", frame, f"{what.__qualname__}.{name}")

    def on_code(event: str, args: Thing, frame: Where) -> None:
        if event == "compile":
            name = args[1]
            if type_(name) is bytes_:
                name = fsdecode(name)
            if type_(name) is not str_ or strange(name):
                return
        if strange(frame.f_code.co_filename):
            object_to("forged_code", "code", frame, event)
        elif frame.f_code.co_filename[:8] == "<frozen " or frame.f_code.co_filename.startswith(lenders):
            by = beyond_stdlib(frame)
            if by is not None and strange(by.f_code.co_filename):
                path = name if event == "compile" else frame.f_locals.get("bytecode_path")
                if not genuine(path, args[0]):
                    object_to("forged_code", "code", by, f"{event} of {path}")

    def genuine(path: Thing, data: Thing) -> bool:
        """Whether code that the import system makes on somebody's behalf is that of a file which only root can have written."""
        try:
            with open_(path, "rb") as file:
                found = file.read()
                mine = fstat(file.fileno()).st_uid == 0
            return mine and found.endswith(data.encode() if type_(data) is str_ else bytes_(data))
        except anything:
            return False

    def on_plain(event: str, args: Thing, frame: Where) -> None:
        frame = beyond_stdlib(frame)
        if frame is not None and strange(frame.f_code.co_filename):
            rule = "gc" if event[:3] == "gc." else "trace" if event[:7] == "sys.set" else "audit"
            name = "walks_heap" if rule == "gc" else "traces" if rule == "trace" else "audits"
            object_to(name, rule, frame, event)

    def on_native(event: str, args: Thing, frame: Where) -> None:
        while frame is not None and frame.f_code.co_filename.startswith(native):
            if frame.f_code.co_name == "<module>":
                return
            frame = frame.f_back
        if frame is not None and strange(frame.f_code.co_filename):
            object_to("native_code", "ctypes", frame, event)

    def on_open(event: str, args: Thing, frame: Where) -> None:
        """Files of the tests are read by pytest and the import system, not by what they test."""
        while frame is not None and frame.f_code.co_filename.startswith(stdlib):
            if frame.f_code.co_filename == quoting:
                return
            frame = frame.f_back
        if frame is None or not strange(frame.f_code.co_filename):
            return
        path = args[0]
        if type_(path) is bytes_:
            path = fsdecode(path)
        if type_(path) is not str_:
            return
        if basename(path) in test_names or realpath(path) in test_files:
            object_to("reads_tests", "tests", frame, path)
        elif path.startswith("/proc/") and ("/mem" in path or "/fd" in path or "/environ" in path):
            object_to("reads_process", "process", frame, path)

    handlers = {
        "os.fork": on_fork,
        "os.forkpty": on_fork,
        "sys._getframe": on_frames,
        "sys._current_frames": on_frames,
        "sys._current_exceptions": on_frames,
        "object.__getattr__": on_getattr,
        "object.__setattr__": on_setattr,
        "object.__delattr__": on_setattr,
        "code.__new__": on_code,
        "compile": on_code,
        "marshal.loads": on_code,
        "marshal.load": on_code,
        "gc.get_objects": on_plain,
        "gc.get_referrers": on_plain,
        "gc.get_referents": on_plain,
        "sys.settrace": on_plain,
        "sys.setprofile": on_plain,
        "sys.addaudithook": on_plain,
        "open": on_open,
        "ctypes.dlopen": on_native,
        "ctypes.dlsym": on_native,
        "ctypes.dlsym/handle": on_native,
        "ctypes.cdata": on_native,
        "ctypes.cdata/buffer": on_native,
        "ctypes.addressof": on_native,
        "ctypes.string_at": on_native,
        "ctypes.wstring_at": on_native,
        "ctypes.call_function": on_native,
    }
    find = handlers.get

    def hook(event: str, args: Thing) -> None:
        handler = find(event)
        if handler is None:
            return
        me = ident()
        if me in busy:
            return
        busy.add(me)
        try:
            handler(event, args, getframe(1))
        finally:
            busy.discard(me)

    os.register_at_fork(after_in_child=lambda: copied.extend(forking))
    registrar, finisher = embed.__code__, end.__code__
    engine = ender(*keep)
    next(engine)
    say = engine.send
    librarian, library = text.__code__, shelf(hidden or {})
    next(library)
    lend = library.send
    if hidden:
        hidden.clear()
    secrets.clear()
    marks.update(
        {
            "\0dsec:check": check,
            "\0dsec:enter": enter,
            "\0dsec:weigh": weigh,
            "\0dsec:equal": equal,
            "\0dsec:seal": seal,
            "\0dsec:globals": globals_,
            "\0dsec:fail": fail,
        }
    )
    del keep
    return Guard(check, weigh, load, watch, lambda: sys.addaudithook(hook), settled, begin, collected, text)
