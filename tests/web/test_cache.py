"""Values that requests share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from determined.web._cache import Cache


def test_reading_is_shared_by_all_who_wait_for_it() -> None:
    begun, go_on, count = threading.Event(), threading.Event(), []

    def read(id: int) -> list[int]:
        count.append(id)
        begun.set()
        assert go_on.wait(30)
        return count[:]

    cache = Cache(read)
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(cache.get, 7, "now")
        assert begun.wait(30)
        others = [pool.submit(cache.get, 7, f"later {number}") for number in range(19)]
        go_on.set()
        found = {len(one.result(30)) for one in (first, *others)}
    assert found <= {1, 2}
    assert len(count) <= 2  # one that had begun already, and one for all who asked meanwhile


def test_change_is_read_and_nothing_else() -> None:
    count: list[int] = []
    cache = Cache(lambda id: count.append(id) or len(count))
    cache._entry(1)
    assert [cache.get(1, "a") for _ in range(3)] == [1, 1, 1]
    assert cache.get(2, "a") == 2


def test_failure_is_not_remembered() -> None:
    values = iter([ValueError("damaged"), 5])

    def read(_: int) -> int:
        value = next(values)
        if isinstance(value, ValueError):
            raise value
        return value

    cache = Cache(read)
    with pytest.raises(ValueError, match="damaged"):
        cache.get(1, "a")
    assert cache.get(1, "a") == 5


def test_few_readings_are_kept() -> None:
    count: list[int] = []
    cache = Cache(lambda id: count.append(id) or id)
    for id in [*range(100), 99, 98, 0]:
        assert cache.get(id, "a") == id
    assert count == [*range(100), 0]
