"""The one table of tolerances: dtype → largest error as a share of the largest value compared."""

import torch

# Sums of a few thousand float32 products in another order.
KERNEL = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
# Logits of a whole tiny model, as a share of the logits' span (the issue asks for 1e-5).
TINY_LOGITS = 1e-5


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> None:
    """Fails unless max |ours - theirs| ≤ share × max |theirs|, elementwise everywhere (no mean hides one bad place)."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} != {tuple(theirs.shape)}"
    error = float((ours.double() - theirs.double()).abs().max())
    assert error <= share * float(theirs.double().abs().max()), f"max error {error:.3g}"
