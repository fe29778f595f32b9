"""Threads that share memory take turns."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lit_het.data_pipelines.memory import MemoryBudget


def test_threads_together_never_hold_more_than_there_is():
    budget, lock, held, most = MemoryBudget(10), threading.Lock(), 0, 0

    def take(size: int) -> None:
        nonlocal held, most
        with budget.held(size):
            with lock:
                held += size
                most = max(most, held)
            time.sleep(0.001)
            with lock:
                held -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, [1, 7, 3, 10, 2, 5] * 10))
    assert 5 < most <= 10


def test_a_piece_larger_than_all_waits_for_all_of_it():
    budget, is_held = MemoryBudget(10), threading.Event()

    def take() -> None:
        with budget.held(1000):
            is_held.set()

    thread = threading.Thread(target=take)
    with budget.held(1):
        thread.start()
        assert not is_held.wait(0.05)
    thread.join(5)
    assert is_held.is_set()


def test_small_pieces_that_come_later_do_not_pass_a_large_one():
    budget, order = MemoryBudget(10), list[str]()

    def take(name: str, size: int) -> None:
        with budget.held(size):
            order.append(name)

    threads = [threading.Thread(target=take, args=arguments) for arguments in (("large", 9), ("small", 1))]
    with budget.held(5):
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        assert order == []
    for thread in threads:
        thread.join(5)
    assert order == ["large", "small"]


def test_memory_comes_back_after_an_error():
    budget = MemoryBudget(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), budget.held(1):
            raise ValueError("broken")
    assert budget._held == 0
