"""Values that lie: what decides comparisons by the agent's own code is compared with others before a test believes it.

A value that equals what a test expects must not equal what lies beside it, and must say the same when it is asked again. How
often and in which order it is asked is up to dice. Everything lives in closures, like the guard's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

Thing = Any  # whatever tests and the code under test hand around


def make_weigh(
    decides: Callable[[Thing, str], bool], tell: Callable[[bytes, str, str], None], returned: Callable[[], None]
) -> Callable[[str, Thing, Thing], None]:
    """decides: whether a class decides one comparison by the agent's code. tell: to the parent. returned: see the guard."""
    all_, any_, len_, type_, range_, chr_, reversed_ = all, any, len, type, range, chr, reversed
    abs_, min_, zip_ = abs, min, zip
    tuple_, set_, list_, dict_, str_, bytes_, int_, float_ = tuple, set, list, dict, str, bytes, int, float
    bool_, object_, frozenset_ = bool, object, frozenset
    failed, anything = AssertionError, Exception
    random, number = os.urandom, int.from_bytes
    mro = type.__dict__["__mro__"].__get__
    plain = frozenset_((int_, str_, bytes_, float_, bool_, complex, type_(None), bytearray, range, type_(...)))
    walked = frozenset_((list_, tuple_, set_, frozenset_, dict_))
    items_of = tuple.__iter__
    bases: Thing = (
        (int_, int.__int__),
        (float_, float.__float__),
        (str_, str.__str__),
        (tuple_, lambda one: tuple_(items_of(one))),
    )

    def below(most: int) -> int:
        return number(random(8), "big") % most

    def shuffled(things: Thing) -> Thing:
        things = list_(things)
        for at in reversed_(range_(1, len_(things))):
            to = below(at + 1)
            things[at], things[to] = things[to], things[at]
        return things

    # what lies beside a value ---------------------------------------------------------------------------------------

    def beside(value: Thing, depth: int = 0) -> Thing:
        """Values that differ from it and look as likely; [] where none can be made."""
        kind = type_(value)
        if kind is int_ or kind is float_:
            step = kind(below(8) + 2)
            tens = kind(10 ** (len_(str_(abs_(int_(value)))) if value == value and value - value == 0 else 1))
            near = [value + 1, value - step, value + tens, value - tens, value * 2 + (value == 0), value + tens * step]
            return [one for one in near if one != value]  # infinite and large ones stay what they are
        if kind is bool_:
            return [not value]
        if kind is str_ or kind is bytes_:
            return [one for _ in range_(6) if (one := other_text(value)) != value]
        if kind is list_ or kind is tuple_:
            return [kind(one) for one in other_items(list_(value), depth)]
        if kind is dict_:
            keys = list_(value)
            return [
                dict_(zip_(keys, one)) for one in other_items(list_(value.values()), depth) if len_(one) == len_(keys)
            ]
        for base, raw in bases if kind not in plain and kind not in walked else ():
            if base in mro(kind):
                return beside(raw(value), depth + 1)
        return []  # objects: which of their fields an equality looks at is for their class to say

    def other_text(text: Thing) -> Thing:
        at = below(len_(text) + 1)
        letter = chr_(97 + below(26))
        new_one = letter if type_(text) is str_ else letter.encode()
        return text[:at] + new_one + text[at + below(2) :]

    def other_items(items: Thing, depth: int) -> Thing:
        made = [[*items, items[-1] if items else 0]]
        for at in range_(min_(len_(items), 3) if depth < 3 else 0):
            made += [[*items[:at], one, *items[at + 1 :]] for one in beside(items[at], depth + 1)[:2]]
        return made

    # asking ---------------------------------------------------------------------------------------------------------

    def says(one: Thing, other: Thing) -> bool:
        try:
            return bool_(one == other)
        except anything:
            return False

    def probe(one: Thing, expected: Thing) -> str:
        """What is wrong with how it compares, "" when nothing is. What differs may be equal now and then (residues, say)."""
        strangers = [object_(), "".join([chr_(97 + below(26)) for _ in range_(12)])]
        near = beside(expected) + beside(expected)
        asked = shuffled([(1, other) for other in near] + [(2, other) for other in strangers])
        at = 1 + below(len_(asked))  # never first: it would become what it meets
        for _ in range_(1 + below(3)):
            asked.insert(at, (0, expected))
            at += below(len_(asked) - at) + 1
        heard = [(what, says(one, other)) for what, other in asked]
        first = [yes for what, yes in heard if what == 0]
        if any_(yes for what, yes in heard if what == 2):
            return "equals everything"
        if any_(first) and not all_(first):
            return "says now this and now that"
        equal = len_([yes for what, yes in heard if what == 1 and yes])
        return "equals what differs, too" if any_(first) and equal * 2 >= len_(near) > 0 else ""

    def deciding(value: Thing) -> Thing:
        """The values in a value whose class decides by the agent's code, and the others; bounded."""
        todo, left = [value], 4096
        liars: list[Thing] = list_()
        others: list[Thing] = list_()
        while todo and left:
            left -= 1
            one = todo.pop()
            kind = type_(one)
            if kind is dict_:
                todo.extend(tuple_(one.values())[:512])
                todo.extend(tuple_(one)[:512])
            elif kind in walked:
                todo.extend(tuple_(one)[:512])
            else:
                try:
                    lies = kind not in plain and (decides(kind, "__eq__") or decides(kind, "__ne__"))
                except anything:
                    lies = True
                (liars if lies else others).append(one)
        return liars, others

    def object_to(one: Thing, what: str) -> None:
        tell(b"N", "lying_value", f"{type_(one).__name__}: {what}")
        raise failed(f"a {type_(one).__name__} {what}")

    def weigh(operator: str, left: Thing, right: Thing) -> None:
        returned()
        if type_(left) in plain and type_(right) in plain:
            return
        if operator in ("in", "not in"):
            kind = type_(right)
            if operator == "in" and kind not in plain and kind not in walked and decides(kind, "__contains__"):
                holds(right, left)
        elif operator in ("==", "!="):
            for mine, other in ((left, right), (right, left)):
                equals(mine, other)
        else:
            both_ways(left, right)

    def holds(right: Thing, left: Thing) -> None:
        near = beside(left)
        equal = 0
        for one in shuffled(near):
            try:
                equal += bool_(one in right)
            except anything:
                continue
        if near and equal == len_(near):
            object_to(right, "holds everything")

    def equals(mine: Thing, other: Thing) -> None:
        liars, _ = deciding(mine)
        if not liars:
            return
        agents, others = deciding(other)
        for one in liars[:64]:
            for expected in [other] if one is mine else [*others[:8], *agents[:8]]:
                if expected is not one and (what := probe(one, expected)):
                    object_to(one, what)
        if liars[0] is mine:
            differing(mine)

    def differing(one: Thing) -> None:
        try:
            odd = bool_(one != one) and bool_(one == one)
        except anything:
            return
        if odd:
            object_to(one, "both equals itself and does not")

    def both_ways(left: Thing, right: Thing) -> None:
        """Of `<` and its like: what is smaller than a value is not greater than it as well."""
        try:
            odd = any_(
                decides(type_(one), name) for one in (left, right) for name in ("__lt__", "__gt__", "__le__", "__ge__")
            )
            if odd and bool_(left < right) and bool_(left > right):
                object_to(left if type_(left) not in plain else right, "is both smaller and greater")
        except failed:
            raise
        except anything:
            return

    return weigh
