"""Operators of torch taken over on one dispatch key; the kernels that were there before are kept, for all the rest.

A kernel in Python gets no argument that has its default value, and a release of torch may add arguments, so calls are
read by the operator's own schema: every argument by name, with its default if it was not passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from undertow.attention.problem import BackendError


class Operator:
    """An operator of torch's aten namespace, and which of its arguments whoever takes it over understands."""

    def __init__(self, name: str, understood: set[str]) -> None:
        arguments = getattr(torch.ops.aten, name).default._schema.arguments
        self.name = name
        self.arguments = tuple(argument.name for argument in arguments)
        self.defaults = {argument.name: argument.default_value for argument in arguments}
        self.foreign = tuple(argument for argument in self.arguments if argument not in understood)

    def __str__(self) -> str:
        return f"aten::{self.name}"


class Call:
    """One call of an operator that was taken over: its arguments by name, and the way to the kernel from before."""

    def __init__(self, operator: Operator, former: Any, received: tuple) -> None:
        self.operator = operator
        self._former = former
        self._received = received  # dispatch keys, positional arguments, keyword arguments
        _, args, kwargs = received
        self.arguments = dict(operator.defaults)
        self.arguments.update(zip(operator.arguments, args))
        self.arguments.update(kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def has(self, name: str) -> bool:
        """Whether the operator takes such an argument."""
        return name in self.arguments

    def given(self, names: tuple[str, ...]) -> list[str]:
        """Which of `names`, arguments of the operator, this call does not leave at their defaults."""
        return [name for name in names if not self._is_default(name)]

    def _is_default(self, name: str) -> bool:
        value, default = self.arguments[name], self.operator.defaults[name]
        return value is default or (not isinstance(value, torch.Tensor) and value == default)

    def as_before(self) -> Any:
        """What the kernel that was taken over makes of this call.

        Raises: BackendError if there was none, as in a torch that was built without flash attention.
        """
        if self._former is None:
            raise BackendError(f"{self.operator}: this torch has no kernel of its own to fall back to")
        keys, args, kwargs = self._received
        return self._former.call_boxed(keys, *args, **kwargs)


Kernel = Callable[[Call], Any]


class Overrides:
    """Operators taken over on one dispatch key, until `remove`. Who took over last must be removed first."""

    def __init__(self, dispatch_key: str, kernels: dict[Operator, Kernel]) -> None:
        formers = {operator: _kernel_of(operator, dispatch_key) for operator in kernels}
        self._library: Any = torch.library.Library("aten", "IMPL")
        for operator, kernel in kernels.items():
            self._library.impl(
                operator.name,
                _entry(operator, formers[operator], kernel),
                dispatch_key,
                with_keyset=True,
                allow_override=True,  # torch 2.11 refuses a second kernel in Python unless it is told
            )

    @property
    def active(self) -> bool:
        return self._library is not None

    def remove(self) -> None:
        """Give the operators back to the kernels that were there before."""
        if self._library is not None:
            self._library._destroy()  # dropping the reference would leave the moment to the garbage collector
            self._library = None


def _kernel_of(operator: Operator, dispatch_key: str) -> Any:
    try:
        return torch.library.get_kernel(str(operator), dispatch_key)
    except RuntimeError:  # there is none
        return None


def _entry(operator: Operator, former: Any, kernel: Kernel) -> Callable[..., Any]:
    def entry(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(Call(operator, former, (keys, args, kwargs)))

    return entry
