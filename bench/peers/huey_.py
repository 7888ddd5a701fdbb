"""huey on SQLite, with threads.

* `fsync=True`, as durable as the others (huey's default leaves `synchronous` to SQLite, which is FULL as well).
* `results=False` and `periodic=False`: nothing is stored about ended tasks, and nobody looks for periodic ones.
* The number of worker threads is the number of places. They share one connection and one lock.
* It deletes a task before it runs it, so what a killed worker had in hand is lost; the others keep it.
* It has no bulk call, so all tasks are enqueued one by one.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import measure

huey = measure.module("huey")


def main() -> None:
    work = measure.arguments()
    queue: Any = huey.SqliteHuey(filename=work.url.removeprefix("sqlite:///"), fsync=True, results=False, timeout=30)
    left, over, lock = work.tasks, threading.Event(), threading.Lock()

    @queue.task()
    def noop(text: str) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left == 0:
                over.set()

    enqueue: Any = noop
    start = time.perf_counter()
    produce(lambda: enqueue(measure.TEXT), work.tasks, work.places)
    enqueued = work.tasks / (time.perf_counter() - start)

    consumer: Any = queue.create_consumer(workers=work.places, periodic=False, worker_type="thread")
    start = time.perf_counter()
    consumer.start()
    over.wait()
    while queue.pending_count():
        time.sleep(measure.LOOK)
    executed = work.tasks / (time.perf_counter() - start)
    consumer.stop(graceful=True)
    measure.answer("huey", {"enqueue": enqueued, "bulk": None, "execute": executed})


def produce(enqueue: Any, tasks: int, producers: int) -> None:
    """Enqueue so many, one by one in each of the producers' threads."""
    rest = iter(range(tasks))

    def producer() -> None:
        for _ in rest:
            enqueue()

    with ThreadPoolExecutor(producers) as threads:
        for done in [threads.submit(producer) for _ in range(producers)]:
            done.result()


if __name__ == "__main__":
    main()
