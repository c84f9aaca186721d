"""The dictionary of axis names used in every tensor annotation, error and log of this package.

| axis         | meaning                                                                    |
|--------------|----------------------------------------------------------------------------|
| `layers`     | decoder layers of the model                                                |
| `heads`      | query heads                                                                |
| `kv_heads`   | key/value heads (grouped-query attention: heads = kv_heads × group)         |
| `tokens`     | tokens of one chunk                                                        |
| `context`    | tokens of the assembled context: head and all chunks, in request order     |
| `prompt`     | rows of the question and the scaffold after the documents                  |
| `rows`       | rows that go through the layers together (selected + prompt), sorted by rank |
| `slots`      | places of the key/value buffers of one request; slot index == rank         |
| `head_dim`   | width of one head                                                          |
| `vocab`      | the model's output vocabulary                                              |
| `hidden`     | width of the rows that go through the layers                               |
| `visual`     | tokens that stand for parts of an image                                    |
| `early`      | first layers behind which rows of a vision tower are added                 |
| `axes`       | axes of RoPE positions: 3 under M-RoPE (time, height, width), else 1       |
| `cell`       | tokens of a chunk that are prefilled apart from its others (a tile)        |

Annotations are checked under pytest only (jaxtyping + beartype).
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Tensor"]
