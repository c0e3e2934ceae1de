"""Places for starting commands: bounded, in order, and given up by those that last."""

from __future__ import annotations

import asyncio

from dsec.edge.starts import Starts


async def test_only_so_many_at_once_and_in_the_order_of_asking() -> None:
    starts = Starts(lanes=2, hold_s=60)
    places = [await starts.take(), await starts.take()]
    order: list[int] = []

    async def ask(number: int) -> None:
        place = await starts.take()
        order.append(number)
        place.free()

    waiting = [asyncio.create_task(ask(number)) for number in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert order == []
    places[0].free()
    places[0].free()  # twice is once
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert order == [0, 1, 2, 3, 4]
    places[1].free()


async def test_a_command_that_lasts_gives_its_place_up() -> None:
    starts = Starts(lanes=1, hold_s=0.01)
    lasting = await starts.take()
    next_one = await asyncio.wait_for(starts.take(), 5)
    lasting.free()
    assert next_one._lanes is not None, "the end of the first frees nobody else's place"
    next_one.free()
