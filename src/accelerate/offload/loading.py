"""Checkpoints loaded into a model: each weight from its file straight to its place."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError, WeightsMismatchError
from accelerate._base.untrusted import shown
from accelerate.collectives.base import communicator
from accelerate.offload.places import DISK, HOST, META, Place, as_device, lookup
from accelerate.offload.safetensors_format import dtype_name, make_header, read_header, tensor_bytes
from accelerate.offload.store import (
    BESIDE_WEIGHTS,
    BroadcastFile,
    OffloadedWeightsLoader,
    WeightsFile,
    load_offloaded_weight,
    load_state_dict,
    offloaded_weights,
    open_weights_file,
    quantisation_statistics,
    scales_name,
)
from accelerate.offload.stored import ALIGNMENT, FilePath
from accelerate.offload.tensors import (
    check_shape,
    find_tied_parameters,
    is_rebuilt,
    owner_of,
    resolve_dtype,
    retie_parameters,
    set_module_tensor_to_device,
    table_of,
)
from accelerate.offload.weight_files import checkpoint_files, raw_path, save_offload_index
from accelerate.runtime import current
from accelerate.runtime.atomic import atomic_file

logger = logging.getLogger("accelerate.utils.modeling")  # programs filter this name

COMPILED = "_orig_mod."
"""What a compiler's shell adds to the names inside it; the weights are those of the model without it."""
CONVERTED_SUFFIX = ".offload.safetensors"
_EXTRA_STATE = "_extra_state"  # under this name a module keeps what is no tensor in a state dict


def convert_weights(file: WeightsFile, folder: FilePath, wanted: Mapping[str, torch.Tensor]) -> Path:
    """Write weights of a file to a safetensors file in a folder, unless they are there already, and return its path.

    The file gets its name when it is complete. Its data are aligned as torch aligns memory.

    Args:
        wanted: Tensors without data, whose dtypes are to be written, by the names in the file.

    Raises:
        ConfigurationError: If a dtype has no name in the format.
    """
    source = file.path
    for name, like in wanted.items():
        if dtype_name(like.dtype) is None:
            raise ConfigurationError(
                f"{name!r} of {str(source)!r} has the dtype {like.dtype!r}, which a safetensors file cannot "
                "hold, so it cannot be offloaded to the disk. Pass dtype= to load the checkpoint in another one."
            )
    origin = {"source": str(source.absolute())}
    if source.is_file():  # another process may read it for this one
        status = source.stat()
        origin |= {"size": str(status.st_size), "modified": str(status.st_mtime_ns)}
    header = make_header(wanted, {"format": "pt", **origin}, alignment=ALIGNMENT)
    target = Path(folder).absolute() / f"{source.stem}{CONVERTED_SUFFIX}"
    with suppress(ConfigurationError, OSError):  # an earlier run may have written the same weights of the same file
        if source.is_file() and read_header(target) == header and target.stat().st_size == header.file_size:
            return target
    total = sum(like.nbytes for like in wanted.values())
    with (
        atomic_file(target) as partial,
        partial.open("wb") as written,
        _progress(total, "Writing weights for the disk", unit="B") as done,
    ):
        written.write(header.to_bytes())
        for name in header.tensors:
            tensor = file.read(name, as_device(HOST)).to(wanted[name].dtype)
            if tensor.numel():
                written.write(tensor_bytes(tensor))
            done(tensor.nbytes)
    return target


@contextmanager
def _progress(total: int, description: str, unit: str = "file") -> Iterator[Callable[[int], object]]:
    """Show how far some work is to a person at a terminal or in a notebook, and by one process of a machine.

    The block calls what it gets with the amount that it has just done.

    Args:
        unit: `"B"` for bytes, which are shown in thousands, millions and so on.
    """
    watched = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    runtime = current.active() if watched else None
    if not watched or (runtime is not None and runtime.local_rank != 0):
        yield lambda done: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=description, unit=unit, unit_scale=unit == "B") as bar:
        yield bar.update


class _CheckpointLoader:
    """Put the weights of all files of one checkpoint where a device map says."""

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Place],
        folder: FilePath | None,
        dtype: torch.dtype | None,
        offload_buffers: bool,
        keep_in_fp32: Iterable[str],
        quantise: bool,
    ) -> None:
        self.model, self.device_map, self.dtype = model, device_map, dtype
        self.offloaded = offloaded_weights(model)
        stores = [weight.store[0] for weight in self.offloaded.values() if weight.store is not None]
        self.folder = folder or next((store.save_folder for store in stores if store.save_folder is not None), None)
        self.offload_buffers, self.keep_in_fp32, self.quantise = offload_buffers, tuple(keep_in_fp32), quantise
        self.index: dict[str, Any] = {}
        self.buffers = {name for name, _ in model.named_buffers()}
        self.known = set(model.state_dict())
        self.plain = {name.replace(COMPILED, ""): name for name in self.known}
        self.loaded: dict[str, tuple[WeightsFile, str]] = {}
        self.unexpected: list[str] = []
        self.to_convert: defaultdict[WeightsFile, list[tuple[str, str, torch.Tensor]]] = defaultdict(list)
        self.in_memory: dict[str, torch.Tensor] = {}
        self.statistics: dict[str, list[str]] = {}

    def load(self, file: WeightsFile) -> None:
        """Place every weight of a file."""
        names = file.names()
        present, self.statistics = set(names), quantisation_statistics(names)
        beside = {name for group in self.statistics.values() for name in group}
        for name in names:
            if name.endswith(BESIDE_WEIGHTS):
                continue  # read together with the weight that it scales
            target = name if name in self.known else self.plain.get(name.replace(COMPILED, ""))
            if target is None:
                if name not in beside:
                    self.unexpected.append(name)
                continue
            _check_is_tensor(name, file.like(name), file.path)
            scales = scales_name(name)
            self._put(target, file, name, scales if scales in present else None)
            self.loaded[target] = (file, name)

    def load_tied(self, tied: Iterable[Sequence[str]]) -> None:
        """Place tied weights that a checkpoint holds under another name of their group only."""
        for group in tied:
            source = next((self.loaded[name] for name in group if name in self.loaded), None)
            if source is None:
                continue
            for name in group:
                if name not in self.loaded:
                    self._put(name, *source, None)
                    self.loaded[name] = source

    def _put(self, name: str, file: WeightsFile, source: str, scales: str | None) -> None:
        """Put a weight of the model where it belongs.

        Args:
            source: Its name in the file.
            scales: The name of its scales there, if it is stored in 8 bits.
        """
        path, _, last = name.rpartition(".")
        if last == _EXTRA_STATE:
            self.model.get_submodule(path).set_extra_state(file.read(source, as_device(HOST)))
            return
        owner, key = owner_of(self.model, name)
        held: torch.Tensor | None = table_of(owner, key)[key]
        place = lookup(self.device_map, name)
        store = self.offloaded[name].store if name in self.offloaded else None
        if place is None and store is not None:
            place = DISK if store[1] in store[0].index else HOST
        elif place is None:
            place = HOST if held is None or held.device == META else held.device
        kept = self.dtype == torch.float16 and any(part in name for part in self.keep_in_fp32)
        dtype = torch.float32 if kept else self.dtype
        if place == DISK and (self.offload_buffers or name not in self.buffers):
            self._offload(name, held, file, source, scales, dtype)
            return
        device = as_device(HOST if place == DISK else place)
        value = file.read(source, device)
        if store is not None and held is not None and scales is None and not is_rebuilt(held):
            check_shape(name, held, tuple(value.shape))
            self.in_memory[name] = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            return
        if type(held).__name__ == "Params4bit" and not value.is_floating_point():
            from accelerate.offload.quantised import place_packed

            beside = {key: file.read(key, device) for key in self.statistics.get(source, ())}
            place_packed(self.model, name, value, beside, device)
            return
        statistics = None if scales is None else file.read(scales, as_device(HOST))
        set_module_tensor_to_device(
            self.model, name, device, value, dtype, fp16_statistics=statistics, clear_cache=False
        )

    def _offload(
        self,
        name: str,
        held: torch.Tensor | None,
        file: WeightsFile,
        source: str,
        scales: str | None,
        dtype: torch.dtype | None,
    ) -> None:
        if self.folder is None and name not in self.offloaded:
            raise _no_folder(name)
        stored = file.like(source)
        if self.quantise and scales is None and stored.is_floating_point():
            from accelerate.offload.quantised import quantize_and_offload_8bit

            value = file.read(source, as_device(HOST))
            if self.folder is None:
                raise _no_folder(name)
            quantize_and_offload_8bit(self.model, value, name, dtype, self.folder, self.index, None)
            return
        check_shape(name, held, tuple(stored.shape))
        wanted = stored.to(dtype) if dtype is not None and stored.is_floating_point() else stored
        self._store(name, file, source, stored, wanted)
        if scales is not None:
            beside = file.like(scales)
            self._store(scales_name(name), file, scales, beside, beside)
        if held is None or held.device != META or (dtype is not None and held.dtype != wanted.dtype):
            set_module_tensor_to_device(self.model, name, META, dtype=dtype, clear_cache=False)

    def _store(self, name: str, file: WeightsFile, source: str, stored: torch.Tensor, wanted: torch.Tensor) -> None:
        """Index a weight where it is stored, or list it for conversion.

        A smaller dtype is written once: every forward then reads fewer bytes, and needs no conversion. A larger one is
        made while the model runs: reading more bytes would take longer than converting.
        """
        if file.in_place and (wanted.dtype == stored.dtype or wanted.itemsize > stored.itemsize):
            self._index(name, file.path, source, wanted.dtype)
        else:
            self.to_convert[file].append((name, source, wanted))

    def _index(self, name: str, path: Path, source: str, dtype: torch.dtype) -> None:
        self.index[name] = {
            "safetensors_file": str(path.absolute()),
            "weight_name": source,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def update_stores(self) -> None:
        """Let the hooks of a model that was dispatched before read what was loaded now."""
        changed: dict[int, tuple[OffloadedWeightsLoader, dict[str, Any]]] = {}
        for weight_name, weight in self.offloaded.items():
            if weight.store is None:
                continue
            store, stored_name = weight.store
            for name, key in ((weight_name, stored_name), (scales_name(weight_name), scales_name(stored_name))):
                found: Any = self.in_memory.get(name, self.index.get(name))
                if self.folder is not None and isinstance(found, dict) and "safetensors_file" not in found:
                    found = load_offloaded_weight(raw_path(self.folder, name), found)
                if found is not None:
                    changed.setdefault(id(store), (store, {}))[1][key] = found
        for store, weights in changed.values():
            store.replace(weights)

    def convert(self) -> None:
        """Write the weights that cannot be used where they are, once all names of tied weights are placed.

        Each file is converted in one go: a second conversion would replace the result of the first.
        """
        for file, entries in self.to_convert.items():
            if self.folder is None:
                raise _no_folder(entries[0][0])
            # One tensor may be stored for two tied weights, in one dtype.
            path = convert_weights(file, self.folder, {source: wanted for _, source, wanted in entries})
            for name, source, wanted in entries:
                self._index(name, path, source, wanted.dtype)
        self.to_convert.clear()


def _check_is_tensor(name: str, value: Any, path: Path) -> None:
    if not isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA_STATE:
        raise ConfigurationError(
            f"{str(path)!r} holds {shown(value)} for {name!r}, which is not a tensor. Give a file with the state dict of a model."
        )


def _no_folder(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} goes to the disk, and no offload_folder was given, so there is nowhere to write it. "
        "Pass offload_folder."
    )


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: FilePath,
    device_map: Mapping[str, Place] | None = None,
    offload_folder: FilePath | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, each weight to its place in the device map.

    Args:
        checkpoint: A weights file, an index of shards, or a folder with one of these.
        device_map: The place of each module; without it, each weight goes where the model's tensor is. A model that is
            dispatched already runs from what was loaded.
        offload_folder: Where the index of weights on the disk is written, and those that cannot be used where they are:
            safetensors files are used in place, other formats and smaller dtypes are converted once.
        dtype: The dtype of floating-point weights in the model.
        offload_state_dict: Accepted for programs that ask for little memory: weights are always read one by one.
        offload_buffers: Write the buffers of modules on the disk too.
        keep_in_fp32_modules: Names of modules that stay in float32 when the rest becomes float16.
        offload_8bit_bnb: Quantise weights for the disk to 8 bits.
        strict: Raise if names of the checkpoint and of the model differ.
        full_state_dict: For a sharded model: the checkpoint holds whole tensors.
        broadcast_from_rank0: Only the first process reads, and sends the weights to the others.

    Raises:
        ConfigurationError: If the checkpoint is not found or does not fit, or weights have no folder to go to.
    """
    torch_dtype = None if dtype is None else resolve_dtype(dtype)
    group = None
    if broadcast_from_rank0 and torch.distributed.is_available() and torch.distributed.is_initialized():
        group = communicator()
    if group is None or group.world_size == 1:
        group = None
        files = checkpoint_files(checkpoint)
    else:  # only the first process has to see the files
        found: list[Any] = [checkpoint_files(checkpoint) if group.rank == 0 else None]
        group.broadcast_objects(found)
        files = found[0]
    if device_map is None and _is_sharded(model):
        _load_sharded(model, files, torch_dtype, strict, full_state_dict, broadcast_from_rank0)
        return
    if offload_folder is not None:
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
    tied = find_tied_parameters(model)
    loader = _CheckpointLoader(
        model,
        dict(device_map or {}),
        offload_folder,
        torch_dtype,
        offload_buffers,
        keep_in_fp32_modules or (),
        offload_8bit_bnb,
    )
    with _progress(len(files), "Loading checkpoint") as done:
        for path in files:
            loader.load(open_weights_file(path) if group is None else BroadcastFile(path, group))
            done(1)
    loader.load_tied(tied)
    loader.convert()
    if strict:
        _check_names(model, loader.unexpected, loader.known - loader.loaded.keys())
    if loader.unexpected:
        logger.warning(
            "These weights of the checkpoint are not in %s and were not used: %r.",
            type(model).__name__,
            loader.unexpected,
        )
    if loader.folder is not None:
        save_offload_index(loader.index, loader.folder)
    loader.update_stores()
    retie_parameters(model, tied)


def _check_names(model: nn.Module, unexpected: Sequence[str], missing: Iterable[str]) -> None:
    missing = sorted(missing)
    if unexpected or missing:
        raise WeightsMismatchError(
            f"The checkpoint does not fit {type(model).__name__}: not in the model {unexpected!r}, not in the checkpoint "
            f"{missing!r}. Load the checkpoint of this model, or pass strict=False."
        )


def _is_sharded(model: nn.Module) -> bool:
    # A model cannot be sharded by a part of torch that was never imported, and importing it here would take a second.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    # After a forward pass the parameters of FSDP 2 may be whole until they are sharded again.
    kinds = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    if any(isinstance(module, kinds) for module in model.modules()):
        return True
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and any(isinstance(parameter, dtensor) for parameter in model.parameters())


def _load_sharded(
    model: nn.Module,
    files: list[Path],
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    # torch looks at one file at a time, and only at unexpected names where it does not send the weights.
    options = StateDictOptions(full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    read = not broadcast_from_rank0 or torch.distributed.get_rank() == 0
    if strict:
        listed: list[Any] = [[name for file in files for name in open_weights_file(file).names()] if read else None]
        if broadcast_from_rank0:
            communicator().broadcast_objects(listed)
        known, found = get_model_state_dict(model).keys(), {name.replace(COMPILED, "") for name in listed[0]}
        # A checkpoint may hold one name of tied weights.
        found |= {name for group in find_tied_parameters(model) if not found.isdisjoint(group) for name in group}
        _check_names(model, sorted(found - known), known - found)
    # Joined parameters of FSDP 1 are filled at once or not at all.
    whole = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    for part in [files] if whole else [[file] for file in files]:
        state = {name: value for file in part for name, value in load_state_dict(file).items()} if read else {}
        if dtype is not None:
            floats = {name for name, value in state.items() if torch.is_tensor(value) and value.is_floating_point()}
            state = {name: value.to(dtype) if name in floats else value for name, value in state.items()}
        set_model_state_dict(model, state, options=options)


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: FilePath) -> None:
    """Put the weights of an offload folder into a model on the CPU."""
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in [name for name in index if not name.endswith(BESIDE_WEIGHTS)]:
        # Copies, so that the folder may be removed or written again.
        scales = scales_name(name)
        statistics = weights[scales].clone() if scales in index else None
        set_module_tensor_to_device(model, name, HOST, value=weights[name].clone(), fp16_statistics=statistics)
