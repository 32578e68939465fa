"""What would be done with a call, without doing it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from undertow.attention.checks import check
from undertow.attention.dispatch import choose
from undertow.attention.forward import choose_forward
from undertow.attention.memory import to_copy
from undertow.attention.problem import Inputs, Problem


@dataclass(frozen=True)
class Explanation:
    """backend, reason: of the backward pass; rejected: backend -> why it was passed over. forward: the same of the
    forward pass. copies: inputs that the kernels cannot address as they are -> why. deterministic: what would be asked.
    """

    backend: str
    reason: str
    rejected: dict[str, str]
    forward: str
    forward_reason: str
    forward_rejected: dict[str, str]
    deterministic: bool
    copies: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for what, name, why, passed in (
            ("backward", self.backend, self.reason, self.rejected),
            ("forward", self.forward, self.forward_reason, self.forward_rejected),
        ):
            lines.append(f"{what}: {name}: {why}")
            lines += [f"  not {other}: {reason}" for other, reason in passed.items()]
        lines.append(f"deterministic: {'yes' if self.deterministic else 'not asked for'}")
        lines += [f"copied for the kernels: {name}: {reason}" for name, reason in self.copies.items()]
        return "\n".join(lines)


def explanation_of(call: Inputs, backend: str, with_dlse: bool) -> Explanation:
    """Who would compute `call`. with_dlse: whether a gradient would flow into LSE.

    Raises: AttentionInputError, BackendError.
    """
    check(call)
    lse = torch.empty(call.lse_shape, dtype=call.lse_dtype, device=call.q.device)
    rows = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    problem = Problem(
        call.q,
        call.k,
        call.v,
        out=rows,
        lse=lse,
        dout=rows,
        dlse=lse if with_dlse else None,
        settings=call.settings,
        sink=call.sink,
        sequences=call.sequences,
    ).honouring_torch()
    forward, backward = choose_forward(call), choose(problem, backend)
    return Explanation(
        backward.backend,
        backward.reason,
        backward.rejected,
        forward.backend,
        forward.reason,
        forward.rejected,
        problem.settings.deterministic,
        to_copy(problem),
    )
