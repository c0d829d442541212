"""From what a layer saw to what is kept of it: records of its parameters, or their part of short rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cdgrab.ghost.convolved import Convolved
from cdgrab.ghost.layers import Records, handler_of
from cdgrab.ghost.passes import Called, Parts, Seen, is_from_outside
from cdgrab.ghost.plan import Layer, Miss, check_count, check_misses
from cdgrab.ghost.records import Record, Rows, Summed, apart
from cdgrab.ghost.sketch import Joined, Sketcher
from cdgrab.hooks.convolution import Found, Given
from cdgrab.hooks.engine import aside
from cdgrab.hooks.first_batch import FirstBatch
from cdgrab.hooks.replayed import own_parameters

if TYPE_CHECKING:
    from cdgrab.ordering import Ordering


class Recorder:
    """Makes the records of a backward pass.

    Args:
        ordering: Knows the batch size, and which epoch a batch belongs to.
        layers: That are watched.
        parameters: Trainable ones of the model, by name.
        mean: Whether the loss is the mean over the batch.
        keeps: Whether records are held on to after the pass.
        sketcher: Shortens them, if that is what is wanted.
    """

    def __init__(
        self,
        ordering: Ordering,
        layers: list[Layer],
        parameters: Mapping[str, nn.Parameter],
        *,
        mean: bool,
        keeps: bool,
        sketcher: Sketcher | None,
    ) -> None:
        self._ordering, self._mean, self._keeps, self._sketcher = ordering, mean, keeps, sketcher
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        # A parameter with several names, as with tied weights, goes by the first of them.
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._names = {
            (layer.name, key): names[id(parameter)]
            for layer in layers
            for key, parameter in layer.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        unknown = {layer.name for layer in layers if not layer.known}
        late = {name for (layer, _), name in self._names.items() if layer in unknown}
        self.first_batch = FirstBatch(parameters, late)
        self._keys = [(layer.name, key) for layer in layers for key in own_parameters(layer.module)]
        self._trained_then: set[tuple[str, str]] | None = None  # in a pass that is made up for
        self._records: Parts = defaultdict(list)
        self._num = 0  # examples
        self.looked_at = 0  # bytes of what layers saw that were not put off

    def begin(self, num: int) -> None:
        """A pass with so many examples; what one before left, which broke off, is not to be mixed with it."""
        self._records.clear()
        self._num, self.looked_at = num, 0
        if self._sketcher is not None:
            self._sketcher.drop()
        if self.first_batch.under_way:
            self.first_batch.begin()

    def finished(self) -> Parts:
        """The records of the pass, which are the caller's from now on."""
        found, self._records = self._records, defaultdict(list)
        return found

    def take_now(self, called: Called, grad: Tensor, given: Given | None) -> None:
        """The records of a known layer, before the pass goes on; it is given what they say its own gradients are."""
        seen = called.seen(grad)
        self.looked_at += seen.nbytes
        sums: Found | None = None if given is None else {}
        with aside(grad.device):
            self._take(seen, self._num, sums=sums, own=self._keeps and is_from_outside(seen.x))
        if given is not None and sums is not None:
            check = partial(self._hold_against, called.layer) if self.first_batch.under_way else None
            given.leave(grad, sums, check)

    def made_parts(self, seen: list[Seen]) -> Joined:
        """What layers of the pass under way, which were put off, add to short rows; to be called aside."""
        assert self._sketcher is not None
        parts: dict[str, Tensor] = {}
        for one in seen:
            self._take(one, self._num, parts)
        return self._sketcher.joined(parts)

    def made_records(self, seen: list[Seen], num: int, trained: tuple[bool, ...]) -> Parts:
        """Records of layers that were put off, perhaps in another pass, in which other parameters were trained."""
        under_way, self._records = self._records, defaultdict(list)
        self._trained_then = {key for key, was in zip(self._keys, trained, strict=True) if was}
        try:
            for one in seen:
                with aside(one.grad.device):
                    self._take(one, num)
            return self._records
        finally:
            self._records, self._trained_then = under_way, None

    def keep_differentiated(self, layer: Layer, records: Records) -> None:
        """Of a layer that has run once more, for all examples of the pass."""
        self._keep(layer, records, self._num)
        self.looked_at += sum(tensor.nbytes for record in records.values() for tensor in record.tensors)

    def _take(
        self,
        seen: Seen,
        num: int,
        parts: dict[str, Tensor] | None = None,
        sums: Found | None = None,
        own: bool = False,
    ) -> None:
        """The records of a known layer, as `_keep` does; with `own`, what is kept of its input are copies."""
        handler, grad = handler_of(seen.layer.module), seen.grad.reshape(seen.shape)
        assert handler is not None
        if grad.shape[0] != num:
            check_count(seen.layer, [grad], num)
        inputs = seen.x.detach()
        if grad.dtype != torch.float32:
            grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if inputs.dtype != grad.dtype and inputs.is_floating_point():
            inputs = inputs.to(grad.dtype)
        records = handler(seen.layer.module, inputs, grad, num)
        self._keep(seen.layer, records, num, parts, sums, inputs if own else None)

    def _keep(
        self,
        layer: Layer,
        records: Records,
        num: int,
        parts: dict[str, Tensor] | None = None,
        sums: Found | None = None,
        x: Tensor | None = None,
    ) -> None:
        """For the end of the pass; short, if that is what will be wanted.

        Args:
            layer: With trained parameters.
            records: Of all its parameters.
            num: Of examples.
            parts: Where to put what is short; by default to that of the batch.
            sums: If the layer needs them, gradients of its parameters whose rows are written are left here.
            x: What is somebody else's, so that it must be copied if it is kept.
        """
        # The mean over fewer examples gives each of them more weight.
        share = num / self._ordering.batch_size if self._mean else 1.0
        for key, record in records.items():
            if not self._is_trained(layer, key):
                continue
            name = self._name_of(layer, key)
            if self.first_batch.under_way:
                self.first_batch.add(name, record, num)
            if self._sketcher is None or (sums is not None and isinstance(record, Convolved) and record.has_short_rows):
                record = record.compact()
            if sums is not None and isinstance(record, Rows):
                sums[key] = record.rows_ND.sum(0).view(self.shapes[name])
            record = record if share == 1 else record.scaled(share)
            if x is not None:
                record = apart(record, x)
            if self._sketcher is None or not self._sketcher.take(name, record, self._ordering._epoch, parts):
                self._records[name].append(_worth_keeping(record))

    def _is_trained(self, layer: Layer, key: str) -> bool:
        if self._trained_then is not None:
            return (layer.name, key) in self._trained_then
        parameter = getattr(layer.module, key, None) if "." not in key else layer.module.get_parameter(key)
        return parameter is not None and parameter.requires_grad

    def _name_of(self, layer: Layer, key: str) -> str:
        name = self._names.get((layer.name, key))
        if name is None:
            raise ValueError(
                f"{key!r} of layer {layer.name!r} was frozen when the model was attached and is trained now; call "
                "detach(), and attach the model again"
            )
        return name

    def _hold_against(self, layer: Layer, found: Found, own: Found) -> None:
        """What a layer is given against what it finds itself, in the first pass."""
        check_misses({self._names[layer.name, key]: Miss.of(found[key], grad) for key, grad in own.items()})


def _worth_keeping(record: Record) -> Record:
    return record.compact() if isinstance(record, Summed) else record
