"""flash-attn-4's own autograd function on our backward pass, in a process of its own: it changes the compiler.

Its forward needs a GPU, so what it would have stored stands in for it; the rest is its code. Prints what was counted.
"""

from __future__ import annotations

import importlib
import json

from tests.integrations.test_patch_fa4 import assert_right
from undertow import patch_fa4
from undertow.attention import counts
from undertow.inputs import Shape, random_batch
from undertow.reference import Scoring


def main() -> None:
    interface = importlib.import_module("flash_attn.cute.interface")
    batch = random_batch(Shape(1, 24, 24, 2, 1), scoring=Scoring(causal=True))
    stored = batch.out.clone(), batch.lse.clone(), None, None, None
    interface._flash_attn_fwd = lambda *args, **kwargs: stored  # type: ignore[attr-defined]
    q, k, v = (x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v))
    with patch_fa4():
        out, _ = interface.FlashAttnFunc.apply(q, k, v, None, None, None, True)
        out.backward(batch.dout)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    assert_right(batch, (q.grad, k.grad, v.grad))
    print(json.dumps(counts()))


if __name__ == "__main__":
    main()
