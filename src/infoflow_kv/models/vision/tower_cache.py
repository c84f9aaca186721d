"""Features of pictures by their content: the tower runs once for a picture, however often and under whatever name."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from infoflow_kv.errors import OptionError
from infoflow_kv.models.vision.adapter import Encoded


class TowerCache:
    """The features used last, up to `max_bytes`; thread-safe.

    `runs` counts towers run, `hits` requests answered without one (from the cache or by another thread's run).
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise OptionError(f"a tower cache of {max_bytes} bytes was asked for; expected 0 or more")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.runs = 0
        self.hits = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Encoded] = OrderedDict()
        self._running: dict[str, Future[Encoded]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str, run: Callable[[], Encoded]) -> Encoded:
        """The features under `key` (`Prepared.key`), by `run` where they are not there; its exceptions pass through,
        to every thread that waited for it, and the next call tries again."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                self.hits += 1
                return found
            future = self._running.get(key)
            is_mine = future is None
            if future is None:
                future = self._running[key] = Future()
                self.runs += 1
        if not is_mine:
            encoded = future.result()
            with self._lock:
                self.hits += 1
            return encoded
        try:
            encoded = run()
        except BaseException as error:
            with self._lock:
                del self._running[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._running[key]
            self._keep(key, encoded)
        future.set_result(encoded)
        return encoded

    def _keep(self, key: str, encoded: Encoded) -> None:
        """Puts features in and the oldest out; features larger than the whole cache are not kept."""
        if encoded.num_bytes > self.max_bytes:
            return
        self._kept[key] = encoded
        self.num_bytes += encoded.num_bytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
