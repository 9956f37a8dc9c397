"""The loader of a device that records operations: batches are sent to it ahead, and the end of a loop's body ends the step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader

from accelerate.collectives.nested import leaves, place_batch, recursively_apply
from accelerate.data_loader.adapter import DataLoaderAdapter
from accelerate.data_loader.dispatcher import DataLoaderDispatcher
from accelerate.data_loader.iterables import AnnotatedBatch
from accelerate.data_loader.loader import DataLoaderShard
from accelerate.devices.xla import XLA

_SHARDING = "input_sharding"


class _EndsSteps:
    """Ends the step of the device when the body of a loop over the loader is over."""

    ends_steps = True

    def _iterate(self) -> Iterator[Any]:
        loader: Any = super()
        try:
            for batch in loader._iterate():
                yield batch
                XLA.end_step()
        except GeneratorExit:  # the loop was left inside its body
            if not sys.is_finalizing():
                XLA.end_step()
            raise


class RecordingDispatcher(_EndsSteps, DataLoaderDispatcher):
    """A loader whose batches come from the first process."""


class MpDeviceLoaderWrapper(_EndsSteps, DataLoaderShard, MpDeviceLoader):  # type: ignore[misc]
    """A prepared loader that sends batches to an XLA device.

    Where worker processes read the data, threads of torch_xla send batches ahead of the loop. Without workers reading has to
    stay in its order with what the program draws, and each batch is sent when it is asked for, while the device computes.

    Args:
        dataloader: A loader, prepared or not.
        device: The device.
        kwargs: Further arguments of `DataLoaderShard`, for a loader that is not prepared.
    """

    device: torch.device

    def __init__(self, dataloader: Any, device: torch.device, **kwargs: Any) -> None:
        base = dataloader.base_dataloader if isinstance(dataloader, DataLoaderAdapter) else dataloader
        super().__init__(None, device, _base_dataloader=base, **kwargs)
        if isinstance(dataloader, DataLoaderAdapter):
            self.__dict__.update({**dataloader.__dict__, "device": self.device})
        self._parallel_loader_kwargs: dict[str, Any] = {}

    @property
    def dataloader(self) -> Any:
        """The loader that reads the data."""
        return self.base_dataloader

    def share_over_devices(self, sharding: Any) -> None:
        """Spread each batch over several devices, as a sharding of torch_xla says."""
        self._parallel_loader_kwargs[_SHARDING] = sharding

    def _open(self, saves_state: Any) -> Any:
        source, progress, batches = super()._open(saves_state)
        # What is annotated says where the reader stands behind it, and only before the next is read.
        is_annotated = saves_state is not None or progress.plan.is_observed
        if getattr(self.base_dataloader, "num_workers", 0) > 0 and not is_annotated:
            return source, progress, self._sent_ahead(batches)
        return source, progress, map(self._sent, batches)

    def _sent(self, batch: Any) -> Any:
        if type(batch) is not AnnotatedBatch:
            return self._place(batch)
        batch.batch = self._place(batch.batch)
        return batch

    def _sent_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches that threads have sent to the device."""
        relay = _Relay(batches, self._place)
        options = {key: value for key, value in self._parallel_loader_kwargs.items() if key != _SHARDING}
        sender = _Sender(relay, [self.device], **options)
        try:
            while (batch := sender.next_item(self.device)) is not None:
                yield batch
            relay.raise_error()
        finally:
            sender.close()

    def _place(self, batch: Any) -> Any:
        sharding = self._parallel_loader_kwargs.get(_SHARDING)
        if sharding is None:
            return place_batch(batch, self.device, self._non_blocking)
        if isinstance(sharding, dict):
            return {key: _spread(value, self.device, sharding.get(key)) for key, value in batch.items()}
        return _spread(batch, self.device, sharding)


class _Sender(ParallelLoader):  # type: ignore[misc]
    """The threads of torch_xla: one reads, one sends."""

    def send_cpu_data_to_device(self, batches: list[Any], device: torch.device) -> list[Any]:
        return [self._cpu_loader.send(batch) for batch in batches]


class _Relay:
    """What the threads read and send; it keeps an error of theirs, which would look like the end of the data."""

    def __init__(self, batches: Iterator[Any], send: Callable[[Any], Any]) -> None:
        self._batches = batches
        self._send = send
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            self._error = error
            raise StopIteration from error

    def send(self, batch: Any) -> Any:
        """Put a batch on the device."""
        try:
            return self._send(batch)
        except BaseException as error:
            self._error = error
            raise

    def raise_error(self) -> None:
        """Raise what was kept."""
        if self._error is not None:
            raise self._error


def _spread(batch: Any, device: torch.device, sharding: Any) -> Any:
    """Return a batch on the devices, its tensors in host memory spread as the sharding says, in one transfer."""
    tensors = [leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
    sent = iter(XLA.model.send_cpu_data_to_device(tensors, device, sharding))
    return recursively_apply(lambda leaf: next(sent) if leaf.device.type == "cpu" else leaf, batch)
