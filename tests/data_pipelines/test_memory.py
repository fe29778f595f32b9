"""Threads that share a memory budget wait for one another."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lit_het.data_pipelines.shards.memory import MemoryBudget


def test_threads_together_never_reserve_more_than_the_capacity():
    budget, lock, held, most = MemoryBudget(10), threading.Lock(), 0, 0

    def take(size: int) -> None:
        nonlocal held, most
        with budget.reserve(size):
            with lock:
                held += size
                most = max(most, held)
            time.sleep(0.001)
            with lock:
                held -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, [1, 7, 3, 10, 2, 5] * 10))
    assert 5 < most <= 10


def test_a_request_above_the_capacity_reserves_all_of_it():
    budget, is_held = MemoryBudget(10), threading.Event()

    def take() -> None:
        with budget.reserve(1000):
            is_held.set()

    thread = threading.Thread(target=take)
    with budget.reserve(1):
        thread.start()
        assert not is_held.wait(0.05)
    thread.join(5)
    assert is_held.is_set()


def test_later_small_requests_do_not_overtake_a_large_one():
    budget, order = MemoryBudget(10), list[str]()

    def take(name: str, size: int) -> None:
        with budget.reserve(size):
            order.append(name)

    threads = [threading.Thread(target=take, args=arguments) for arguments in (("large", 9), ("small", 1))]
    with budget.reserve(5):
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        assert order == []
    for thread in threads:
        thread.join(5)
    assert order == ["large", "small"]


def test_memory_is_released_after_an_error():
    budget = MemoryBudget(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), budget.reserve(1):
            raise ValueError("broken")
    assert budget._reserved == 0
