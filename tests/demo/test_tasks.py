"""The data file and the choice of tasks."""

from __future__ import annotations

import pytest

from dsec.demo.errors import DemoError
from dsec.demo.tasks import DEFAULT_TASKS, load, select

from .conftest import TASK


def test_the_data_file_is_complete() -> None:
    tasks = load()
    assert len(tasks) == 28
    assert all(task.fail_to_pass and task.pass_to_pass and task.test_paths and task.source_dirs for task in tasks)
    assert not any(set(task.fail_to_pass) & set(task.pass_to_pass) for task in tasks)


def test_the_default_tasks_come_first_and_the_seed_orders_the_rest() -> None:
    assert tuple(task.id for task in select((), 8, 0)) == DEFAULT_TASKS
    first, second = select((), 20, 0), select((), 20, 1)
    assert first[:8] == second[:8] and first != second
    assert select((), 20, 0) == first


def test_named_tasks_are_taken_once() -> None:
    assert [task.id for task in select(("bleach-6.1.0", "bleach-6.1.0"), 8, 0)] == ["bleach-6.1.0"]


@pytest.mark.parametrize(("ids", "count"), [(("nothing-1",), 8), ((), 0), ((), 29)])
def test_what_is_not_there_is_named(ids: tuple[str, ...], count: int) -> None:
    with pytest.raises(DemoError) as caught:
        select(ids, count, 0)
    assert caught.value.hint


def test_paths_belong_to_source_or_tests_by_whole_names() -> None:
    assert TASK.is_source("calc/__init__.py") and not TASK.is_source("calc2/__init__.py")
    assert TASK.is_test("calc/tests/x.py") and not TASK.is_source("calc/tests/x.py")
    assert not TASK.is_test("calc/tests2.py")
