"""The first batch, compared with the gradients that `backward()` leaves: it shows which parameters are not watched.

A weight may be used outside of its layer, where no hook sees it. Then the gradients of single examples do not add up
to that of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from cdgrab.factors import Factors
from cdgrab.per_example.engine import aside, at_end_of_pass, current_pass, gets_gradient, whole

# By how much sums over examples may miss the gradient of the batch, as a share of its length: rounding in single
# precision, and where half precision or a GPU's TF32 takes part.
_ROUNDING, _ROUGH = 1e-3, 0.03
# Terms that cancel leave rounding errors as large as themselves, though the gradient is small: these shares of the
# lengths of all examples' gradients, and of the longest gradient in the model, are added to what may be missed.
_OF_TERMS, _OF_LONGEST = 1e-2, 1e-3


class Found(NamedTuple):
    """What the uses of a parameter add up to so far."""

    total: Tensor
    part: Tensor  # of the rows of the batch
    rough: bool  # whether half precision or a GPU took part


class Comparison(NamedTuple):
    """A parameter's gradient beside the sum over examples."""

    error: float
    length: float  # of the gradient
    terms: float  # the lengths of the examples' gradients, added up
    found: Found | None  # None if no layer used it

    def is_off(self, longest: float) -> bool:
        """Whether the two differ by more than rounding; `longest` is the length of the model's longest gradient."""
        share = _ROUGH if self.found is not None and self.found.rough else _ROUNDING
        return self.error > share * (self.length + _OF_TERMS * self.terms + _OF_LONGEST * longest)


class FirstBatch:
    """Compares sums over examples with the gradients of the parameters, in the first batch.

    A layer's factors are there before the gradients of its parameters. These are compared as they come, and what is
    equal is not kept.

    Args:
        parameters: The trainable parameters, by name.
        late: Names of the parameters whose factors come only at the end of the pass.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], late: Collection[str]) -> None:
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._late = late
        self._found: dict[str, Found] = {}
        self._gradients: dict[str, Tensor] = {}  # of those that come late
        self._compared: dict[str, Comparison] = {}
        self._tasks = (-1, -1)  # the pass that layers took part in, and the pass that parameters took part in
        self.under_way = True  # until a batch has been compared
        self._handles: dict[int, tuple[Tensor, Any]] = {}
        for name, parameter in parameters.items():
            self.watch(name, parameter)

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Compare gradients of this tensor, too: `fully_shard` puts another one in a parameter's place."""
        if id(parameter) not in self._handles:
            handle = parameter.register_hook(partial(self._on_gradient, name, parameter))
            self._handles[id(parameter)] = parameter, handle

    def begin(self) -> None:
        """Begin with a pass; what one before left, which broke off, does not count."""
        self._tasks = (current_pass(), self._tasks[1])
        self._clear()

    def add(self, name: str, factors: Factors, part: Tensor, *, rough: bool) -> None:
        """Take one use of a parameter: its factors, and what they add to the rows of the batch."""
        total = factors.total().view(self._shapes[name])
        before = self._found.get(name)
        if before is not None:
            total, part, rough = before.total + total, before.part + part, before.rough or rough
        self._found[name] = Found(total, part, rough)

    def finish(self) -> dict[str, Tensor | None]:
        """Stop comparing. Returns the parameters that are off, with what they have added to the rows, if anything."""
        for name, grad in self._gradients.items():
            self._compare(name, grad)
        for name, found in self._found.items():  # which came after the gradient, and so is no part of it
            if name in self._compared:
                miss = self._compared[name]
                self._compared[name] = miss._replace(error=miss.error + float(found.total.norm()), found=found)
        longest = max((one.length for one in self._compared.values()), default=0.0)
        off = {name: one for name, one in self._compared.items() if one.is_off(longest)}
        self.stop()
        return {name: None if one.found is None else one.found.part for name, one in off.items()}

    def stop(self) -> None:
        """Remove the hooks on parameters."""
        self._clear()
        self.under_way = False
        for parameter, handle in self._handles.values():
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # autograd would check an empty dict after every backward pass
        self._handles = {}

    def _clear(self) -> None:
        self._found.clear()
        self._gradients.clear()
        self._compared.clear()

    def _on_gradient(self, name: str, parameter: Tensor, grad: Tensor) -> None:
        task = current_pass()
        if task not in self._tasks and gets_gradient(parameter):
            at_end_of_pass(partial(self._check_layers_took_part, task))
            self._tasks = (self._tasks[0], task)
        if name in self._late:
            # Only the first belongs to this pass: a layer that runs again may differentiate itself.
            self._gradients.setdefault(name, grad.detach().clone())
        else:
            with aside(grad.device):
                self._compare(name, grad.detach())

    def _check_layers_took_part(self, task: int) -> None:
        if self.under_way and self._tasks[0] != task:
            raise ValueError(
                "a backward pass left gradients in the model, but no watched layer took part in it, so nothing was "
                "observed: the model runs compiled, or uses its weights without calling its layers; do not compile "
                "it, or use source='batch'"
            )

    def _compare(self, name: str, grad: Tensor) -> None:
        grad = grad.to_dense() if grad.is_sparse else whole(grad)
        found, length = self._found.pop(name, None), float(grad.norm())
        if found is None:
            self._compared[name] = Comparison(length, length, 0.0, None)
            return
        compared = Comparison(float((found.total - grad).norm()), length, float(found.part.norm(dim=1).sum()), found)
        kept = compared.is_off(0.0)
        self._compared[name] = compared if kept else compared._replace(found=None, error=0.0)
