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
from operator import is_ as _is
from time import monotonic as _clock
from typing import Any, NamedTuple

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


class Guard(NamedTuple):
    """check, weigh, settled: see there. load: compiles a marked tree. install: from here on the hook watches (for good)."""

    check: Callable[[], None]
    weigh: Callable[[str, Any, Any], None]
    load: Callable[..., types.CodeType]
    watch: Callable[[str, Any, Iterable[str], bool, bool], None]
    install: Callable[[], None]
    settled: Callable[..., None]
    begin: Callable[[Thing], None]
    collected: Callable[[Thing], None]


def _lost() -> type[BaseException]:
    """What `pytest.fail` raises."""
    from _pytest.outcomes import Failed

    return Failed


def make_guard(descriptor: int, terrain: Terrain, secrets: dict[int, bytes]) -> Guard:
    """secrets: what the end of each marked test says, by its index; emptied here: only the generator's frame knows it then."""
    # every name below is a local of this function: nothing is looked up where it could have been changed
    write, leave, getframe, is_ = os.write, os._exit, sys._getframe, _is
    all_, map_, zip_, len_, isinstance_, type_ = all, map, zip, len, isinstance, type
    tuple_, set_, list_, dict_, str_, bytes_, int_, float_ = tuple, set, list, dict, str, bytes, int, float
    frozenset_, bool_, complex_, object_ = frozenset, bool, complex, object
    failed, anything = AssertionError, Exception
    random, number, ident, globals_ = os.urandom, int.from_bytes, _ident, globals
    function, method, builtin, code_of = types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.CodeType
    module, bag, wrapper = types.ModuleType, types.SimpleNamespace, type(object.__eq__)
    classmethod_, staticmethod_, property_, mro = classmethod, staticmethod, property, type.__dict__["__mro__"].__get__
    vars_of = type.__dict__["__dict__"].__get__
    realpath, basename, fsdecode, join = os.path.realpath, os.path.basename, os.fsdecode, os.path.join
    plain = frozenset_((int_, str_, bytes_, float_, bool_, complex_, type_(None), bytearray, range, type_(...)))
    walked = frozenset_((list_, tuple_, set_, frozenset_, dict_))
    tampered = TAMPERED
    enforce = terrain.changed is not None
    changed: frozenset[Thing] = terrain.changed or frozenset_()
    workdir, stdlib, allow, trusted = terrain.workdir + "/", terrain.stdlib, terrain.allow, terrain.trusted
    test_files, test_names = terrain.tests, frozenset_(basename(path) for path in terrain.tests)
    lookers = frozenset_(join(stdlib, name) for name in ("inspect.py", "dis.py", "operator.py", "functools.py"))
    native = (join(stdlib, "ctypes") + "/",)
    quoting = join(stdlib, "traceback.py")
    busy: set[int] = set_()
    verdicts: dict[str, bool] = dict_()
    watched: list[Any] = list_()
    sealed: dict[str, Any] = dict_()
    seen: set[str] = set_()
    loaded: set[str] = set_()
    marks: dict[str, Callable[..., object]] = dict_()
    protected: set[Any] = set_()
    current: list[Thing] = list_()
    params: dict[Thing, Thing] = dict_()
    blake, chr_, compile_, partial, getattr_ = _blake, chr, compile, _partial, getattr
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
        """Whether code of this file may be the agent's."""
        known = verdicts.get(path)
        if known is None:
            if path in changed:
                known = True
            elif path.startswith(trusted):
                known = False
            else:
                known = not (enforce and path.startswith(workdir))
            verdicts[path] = known
        return known

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

    def end(index: int, given: Thing) -> None:
        """The last thing a test does. given: its arguments, as far as it never assigns to them."""
        frame: Where = getframe(1)
        if ident() != main:
            fatal("forged_end", "a test ended in another thread than pytest's")
        for name, value in given:
            if current and (getattr_(current[0], "funcargs", empty) or empty).get(name, value) is not value:
                fatal("forged_end", f"{frame.f_code.co_name} ran with another {name} than pytest gave it")
        while enforce and "wraps" not in allow and (frame := frame.f_back) is not None:
            if strange(frame.f_code.co_filename):
                fatal("forged_end", f"a test was called by {frame.f_code.co_filename}:{frame.f_lineno}")
        check()
        say(index)

    def begin(item: Thing) -> None:
        """pytest is about to run this item; what it was parametrised with must still be what it was collected with."""
        current.clear()
        current.append(item)
        before, now = params.get(item), parameters(item)
        if before is not None and not (len_(before) == len_(now) and all_(map_(is_, before, now))):
            fatal("patched", "the parameters of a test were changed after it had been collected")

    def collected(items: Thing) -> None:
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
        """exact: nobody replaces these, tests themselves included; else only the agent's code must not. slow: looked at
        after each test, not at each assert."""
        space = vars_of(holder) if isinstance_(holder, type_) else holder.__dict__
        keys = tuple_(name for name in names if name in space)
        watched.append((label, space.get, keys, tuple_(map_(space.get, keys)), exact, slow))

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
        watched.append((name, space.get, mine, tuple_(map_(space.get, mine)), True, False))
        watched.append((name, space.get, rest, tuple_(map_(space.get, rest)), False, False))

    def owner(value: Thing, depth: int = 0) -> str:
        """Whose code a value is: "agent", "trusted", or "c" when it has none to look at."""
        kind = type_(value)
        if kind in (classmethod_, staticmethod_, method):
            return owner(value.__func__, depth + 1) if depth < 8 else "agent"
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
        for label, get, keys, values, exact, slow in watched:
            if (slow and not settled) or all_(map_(is_, map_(get, keys), values)):
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
                    if exact or whose == "agent" or (whose == "c" and settled and now is not None):
                        fatal("patched", f"{label}.{key}")
            finally:
                if not inner:
                    busy.discard(me)

    def settled(hooks: Thing = (), *, last: bool = False) -> None:
        """After a test. hooks: lists of pytest's hook implementations, none of which may be the agent's.

        Looking at everything takes a millisecond: it is done every 20, after the first tests, and at the end.
        """
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

    def suspects(value: Thing) -> Thing:
        """The values in a value whose class decides by the agent's code; bounded."""
        todo, found, left = [value], [], 4096
        while todo and left:
            left -= 1
            one = todo.pop()
            kind = type_(one)
            if kind in plain:
                continue
            if kind is dict_:
                todo.extend(tuple_(one.values())[:512])
                todo.extend(tuple_(one)[:512])
            elif kind in walked:
                todo.extend(tuple_(one)[:512])
            else:
                try:
                    if liar_class(kind, "__eq__") or liar_class(kind, "__ne__"):
                        found.append(one)
                except anything:
                    found.append(one)
        return found

    def strangers(other: Thing) -> Thing:
        """Values that nothing equals which also equals `other`, in an order that nobody can know."""
        many = number(random(8), "big")
        made = [object_(), many, "".join(map_(chr_, random(12)))]
        kind = type_(other)
        if kind is int_ or kind is float_:
            made.append(-other - 1 - many)
        elif kind is str_:
            made.append(other + str_(many))
        elif kind is bytes_:
            made.append(other + random(8))
        elif kind is list_:
            made.append([*other, many])
        elif kind is tuple_:
            made.append((*other, many))
        elif kind is dict_:
            made.append({**other, many: many})
        turn = many % len_(made)
        return made[turn:] + made[:turn]

    def weigh(operator: str, left: Thing, right: Thing) -> None:
        if type_(left) in plain and type_(right) in plain:
            return
        if operator in ("in", "not in"):
            kind = type_(right)
            if operator == "in" and kind not in plain and kind not in walked and liar_class(kind, "__contains__"):
                lying("holds", kind, right, "__contains__", strangers(left)[:1])
            return
        for mine, other in ((left, right), (right, left)):
            for one in suspects(mine):
                lying("equals", type_(one), one, "__eq__", strangers(other if one is mine else None))
                if operator == "!=" and mine is one:
                    differing(one)

    def lying(what: str, kind: Thing, one: Thing, name: str, others: Thing) -> None:
        for other in others:
            try:
                yes = bool_(other in one) if what == "holds" else bool_(one == other)
            except anything:
                continue
            if yes and "equality" not in allow:
                tell(b"N", "lying_value", f"{kind.__name__}: {what} everything")
                raise failed(f"a {kind.__name__} {what} everything it is compared with")

    def differing(one: Thing) -> None:
        try:
            odd = bool_(one != one) and bool_(one == one)
        except anything:
            return
        if odd:
            raise failed(f"a {type_(one).__name__} both equals itself and does not")

    def fail() -> None:
        """The end of a canary."""
        raise lost("this must fail", False)

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
        if detail not in seen and len_(seen) < 50:
            seen.add(detail)
            tell(b"N", name, detail)

    def on_frames(event: str, args: Thing, frame: Where) -> None:
        frame = acting(frame, lookers)
        if frame is not None and strange(frame.f_code.co_filename) and in_test(frame):
            object_to("reads_frames", "frames", frame, event)

    def on_getattr(event: str, args: Thing, frame: Where) -> None:
        what, name = args
        if what is engine:
            fatal("reads_runner", name)
        if name == "f_code":
            code = what.f_code
        elif name == "__code__" and type_(what) is function:
            code = what.__code__
        elif name in ("tb_frame", "gi_frame", "cr_frame", "ag_frame"):
            code = None
        else:
            return
        frame = acting(frame, lookers)
        if frame is None or not strange(frame.f_code.co_filename):
            return
        if code in protected if code is not None else in_test(frame):
            object_to("reads_frames", "frames", frame, name)

    def on_setattr(event: str, args: Thing, frame: Where) -> None:
        what, name = args[0], args[1]
        if name not in ("__code__", "__defaults__", "__kwdefaults__") or type_(what) is not function:
            return
        if strange(frame.f_code.co_filename) and not strange(what.__code__.co_filename):
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

    def on_plain(event: str, args: Thing, frame: Where) -> None:
        if strange(frame.f_code.co_filename):
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

    registrar, finisher = embed.__code__, end.__code__
    engine = ender(*keep)
    next(engine)
    say = engine.send
    secrets.clear()
    marks.update(
        {
            "\0dsec:check": check,
            "\0dsec:weigh": weigh,
            "\0dsec:equal": equal,
            "\0dsec:seal": seal,
            "\0dsec:globals": globals_,
            "\0dsec:fail": fail,
        }
    )
    del keep
    return Guard(check, weigh, load, watch, lambda: sys.addaudithook(hook), settled, begin, collected)
