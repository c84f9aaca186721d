"""A model's images as the rooms ask for them: the chunk side of an adapter, and its features by content."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from infoflow_kv.errors import ComputeError, DocumentError
from infoflow_kv.models.pictures import Picture, read_picture, shown
from infoflow_kv.models.vision.adapter import Encoded, Prepared, VisionAdapter, digest
from infoflow_kv.models.vision.tower_cache import TowerCache
from infoflow_kv.records import ChunkImages, ChunkInputs
from infoflow_kv.shapes import Int, Tensor

TOWER_CACHE_BYTES = 256 * 2**20
MAX_IMAGE_BYTES = 512 * 2**20
KNOWN_PICTURES = 4096  # a few hundred bytes each: no pixels


class Vision:
    """What a vision-language model does with pictures. Thread-safe; `towers` counts how often the tower ran."""

    def __init__(self, adapter: VisionAdapter, window_tokens: int, cache_bytes: int = TOWER_CACHE_BYTES) -> None:
        self.adapter = adapter
        self.window_tokens = window_tokens
        self.towers = TowerCache(cache_bytes)
        self._pictures: OrderedDict[str, Picture] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, source: Any) -> Picture:
        """The picture of a path or of bytes; DocumentError where there is none that can be read.

        A file of the same bytes is not decoded again: to know a picture takes its pixels, which costs more than all
        else of a request whose chunks are stored.
        """
        if not isinstance(source, (bytes, str, PathLike)):
            raise DocumentError(f"an image is a {type(source).__name__}; expected the bytes of a file, or its path")
        name = "picture" if isinstance(source, bytes) else f"picture '{shown(source)}'"
        try:
            data = source if isinstance(source, bytes) else _bytes_of(Path(source), name)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DocumentError(f"{name} cannot be read ({reason or error})") from error
        key = hashlib.sha256(data).hexdigest()
        with self._lock:
            known = self._pictures.get(key)
        if known is None or known.notices:  # notices name the file
            known = replace(read_picture(data, name=name), source=b"")
            with self._lock:
                self._pictures[key] = known
                while len(self._pictures) > KNOWN_PICTURES:
                    self._pictures.popitem(last=False)
        return replace(known, source=data if isinstance(source, bytes) else Path(source), name=name)

    def prepare(self, picture: Picture) -> Prepared:
        """The picture's tokens; DocumentError where this model's processor cannot take it."""
        return self.adapter.prepare(picture)

    def images(self, token_ids: Sequence[int], prepared: Sequence[Prepared], tiles: int = 1) -> ChunkImages:
        """The images of a chunk whose tokens are these; `prepared` in the order in which they stand there.

        `tiles`: k of the k × k tiles in which each is prefilled (1: whole), as in the paper's Table 4.
        """
        if len(token_ids) >= self.window_tokens:
            raise DocumentError(
                f"an image and its words have {len(token_ids)} tokens, and the model's window is {self.window_tokens}: "
                "give a smaller image"
            )
        positions = self.adapter.positions(token_ids, prepared)
        visual = torch.nonzero(torch.tensor(list(token_ids)) == self.adapter.image_token_id)[:, 0].to(torch.int32)
        found = int(visual.numel())
        if found != sum(one.num_visual for one in prepared):
            raise ComputeError(f"a chunk holds {found} image tokens, its images are of another number")
        cells = self._cells(token_ids, visual, prepared, tiles) if tiles > 1 else ()
        keys = [one.key for one in prepared]
        return ChunkImages(
            key=digest("images", self.adapter.name, str(tiles if cells else 1), *keys),
            layout=(found, self.adapter.hidden, self.adapter.num_early, self.adapter.num_axes),
            positions=positions,
            visual=visual,
            cells=cells,
            prepared=tuple(prepared),
        )

    def inputs(self, images: ChunkImages) -> ChunkInputs:
        """What the layers read where these images are; the tower runs for those that it has not seen lately."""
        encoded = [self.towers.get(one.key, partial(self._encode, one)) for one in images.prepared]
        return ChunkInputs(
            positions=images.positions,
            visual=images.visual,
            embeddings=torch.cat([one.embeddings for one in encoded]),
            layer_rows=torch.cat([one.layer_rows for one in encoded], dim=1),
        )

    def _encode(self, prepared: Prepared) -> Encoded:
        if self.adapter.prepare(prepared.picture).key != prepared.key:
            raise ComputeError("the vision tower has changed since this prompt was made, or it is another model's")
        return self.adapter.encode(prepared)

    def _cells(
        self, token_ids: Sequence[int], visual: Int[Tensor, " visual"], prepared: Sequence[Prepared], tiles: int
    ) -> tuple[Int[Tensor, " cell"], ...]:
        """Runs of text, and the tiles of each picture, in the order of their first tokens."""
        cells = []
        first = 0
        for one in prepared:
            own = visual[first : first + one.num_visual].long()
            cells += [own[tile] for tile in self.adapter.tiles(one, tiles)]
            first += one.num_visual
        is_visual = torch.zeros(len(token_ids), dtype=torch.bool)
        is_visual[visual.long()] = True
        for seen, run in groupby(range(len(token_ids)), key=lambda index: bool(is_visual[index])):
            if not seen:
                cells.append(torch.tensor(list(run)))
        return tuple(sorted(cells, key=lambda cell: int(cell[0])))


def _bytes_of(path: Path, name: str) -> bytes:
    if not path.is_file():
        raise DocumentError(f"{name} is no file; give the path of an image file")
    if path.stat().st_size > MAX_IMAGE_BYTES:
        raise DocumentError(f"{name} has more than {MAX_IMAGE_BYTES:,} bytes; give a smaller file")
    return path.read_bytes()
