"""The sizes of the axes over which data and model are spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate._base.lazy import attach_passing_names
from accelerate.config import env
from accelerate.config.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchPipelineParallelConfig,
    TorchTensorParallelConfig,
)
from accelerate.parallel.mesh import build_mesh, submesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

attach_passing_names(__name__)

_DATA_AXES = (MeshAxis.DP_REPLICATE, MeshAxis.DP_SHARD)
# Those that spread one share of the data, innermost first.
_MODEL_AXES = tuple(axis for axis in reversed(MeshAxis) if axis not in _DATA_AXES)
_BACKENDS = {"cp_backend": ("torch",), "sp_backend": ("deepspeed",)}
_HANDLERS = {
    MeshAxis.TP: TorchTensorParallelConfig,
    MeshAxis.CP: TorchContextParallelConfig,
    MeshAxis.SP: DeepSpeedSequenceParallelConfig,
    MeshAxis.PP: TorchPipelineParallelConfig,
}
_PREFIX = "PARALLELISM_CONFIG_"


class _Sizes(MutableMapping[str, int]):
    """Live view of the `<axis>_size` attributes of a config, by axis; setting a further name adds an axis."""

    def __init__(self, config: ParallelismConfig) -> None:
        self._config = config

    def __getitem__(self, axis: str) -> int:
        if axis not in set(self):
            raise KeyError(axis)
        size: int = getattr(self._config, f"{axis}_size")
        return size

    def __setitem__(self, axis: str, size: int) -> None:
        if axis not in set(self):
            self._config.__dict__[_ADDED] = (*self._config.__dict__.get(_ADDED, ()), axis)
        setattr(self._config, f"{axis}_size", size)

    def __delitem__(self, axis: str) -> None:
        raise TypeError(f"The axis {axis!r} of a ParallelismConfig cannot be removed. Set its size to 1.")

    def __iter__(self) -> Iterator[str]:
        yield from self._config.__dict__.get(_ADDED, ())
        yield from (axis.value for axis in MeshAxis)

    def __len__(self) -> int:
        return len(list(self))

    def __repr__(self) -> str:
        return repr(dict(self))


_ADDED = "_added_axes"
"""The entry of a config's namespace that names the axes that other libraries added to it."""


@dataclass
class ParallelismConfig:
    """How many ranks each axis of parallelism has; the product is the number of processes.

    A size that is not given is read from the launcher's variables, else it is 1.

    Args:
        dp_replicate_size: Replicas of the model.
        dp_shard_size: Ranks over which weights are sharded.
        tp_size: Ranks over which layers are split.
        cp_size: Ranks over which sequences are split (context parallelism).
        cp_backend: Engine of context parallelism.
        sp_size: Ranks over which sequences are split (sequence parallelism).
        sp_backend: Engine of sequence parallelism.
        tp_handler: Options of tensor parallelism.
        cp_handler: Options of context parallelism.
        sp_handler: Options of sequence parallelism.
        pp_size: Ranks over which the layers of the model are spread in stages (pipeline parallelism).
        pp_handler: Options of pipeline parallelism.

    Raises:
        ConfigurationError: If a size, backend or handler cannot be, or two axes exclude each other.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    pp_size: int | None = None
    pp_handler: Any = None

    device_mesh: ClassVar[Any] = None
    """The mesh, None until it is made; set on the object then, and no field, because it is no setting."""

    def __post_init__(self) -> None:
        for axis in MeshAxis:
            name = f"{axis}_size"
            size, origin = getattr(self, name), ""
            if size is None:
                variable = f"{_PREFIX}{name.upper()}"
                size, origin = _number(env.get(variable) or "1"), f", which the variable {variable} says,"
            if not isinstance(size, int) or size < 1:
                raise ConfigurationError(
                    f"ParallelismConfig({name}={size!r}){origin} is not a number of ranks. "
                    "Write a whole number from 1 on."
                )
            setattr(self, name, size)
        for name, known in _BACKENDS.items():
            value = getattr(self, name) or env.get(f"{_PREFIX}{name.upper()}", known[0])
            if value not in known:
                raise ConfigurationError(
                    f"ParallelismConfig({name}={value!r}) names no engine. Write one of {', '.join(known)}."
                )
            setattr(self, name, value)
        if self.cp_enabled and self.sp_enabled:
            raise ConfigurationError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both split the sequence. Set one of them to 1."
            )
        self._fill_handlers()

    def _fill_handlers(self) -> None:
        """Give every axis in use its options; sizes may be set after the object was made."""
        for axis, kind in _HANDLERS.items():
            name = f"{axis}_handler"
            handler = getattr(self, name)
            if handler is None and self._size(axis) > 1:
                setattr(self, name, kind())
            elif handler is not None and not isinstance(handler, kind):
                raise ConfigurationError(
                    f"ParallelismConfig({name}={handler!r}) is of the type {type(handler).__name__}, which has not the "
                    f"options of this axis. Write {name}={kind.__name__}(...), or leave it out."
                )

    # Names with an underscore up to `_validate_accelerator`: other libraries call, wrap and replace them.

    @property
    def _sizes(self) -> MutableMapping[str, int]:
        return _Sizes(self)

    @_sizes.setter
    def _sizes(self, sizes: Mapping[str, int]) -> None:
        self._sizes.update(sizes)

    def _set_size(self, parallelism: str, size: int) -> None:
        if parallelism not in self._sizes:
            raise ConfigurationError(
                f"There is no axis {parallelism!r} in a ParallelismConfig. Write one of {', '.join(self._sizes)}."
            )
        self._sizes[parallelism] = size

    def _get_mesh(self) -> tuple[()] | tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the axes in use and their sizes, outermost first; nothing without axes."""
        used = {axis: size for axis, size in self._sizes.items() if size > 1}
        return (tuple(used), tuple(used.values())) if used else ()

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Check the sizes against a run; every `Accelerator` calls this after `fit` has checked its own."""
        if accelerator.parallelism_config is not self:
            self.fit(accelerator.num_processes)

    def _size(self, axis: MeshAxis) -> int:
        size: int = getattr(self, f"{axis}_size")
        return size

    def _enabled(self, *axes: MeshAxis) -> list[str]:
        return [axis.value for axis in axes if self._size(axis) > 1]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Return whether there are replicas."""
        return self._size(MeshAxis.DP_REPLICATE) > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Return whether weights are sharded."""
        return self._size(MeshAxis.DP_SHARD) > 1

    @property
    def tp_enabled(self) -> bool:
        """Return whether layers are split."""
        return self._size(MeshAxis.TP) > 1

    @property
    def cp_enabled(self) -> bool:
        """Return whether sequences are split by context parallelism."""
        return self._size(MeshAxis.CP) > 1

    @property
    def sp_enabled(self) -> bool:
        """Return whether sequences are split by sequence parallelism."""
        return self._size(MeshAxis.SP) > 1

    @property
    def pp_enabled(self) -> bool:
        """Return whether the model is spread in stages."""
        return self._size(MeshAxis.PP) > 1

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis, by its name, outermost first."""
        return dict(self._sizes)

    @property
    def total_size(self) -> int:
        """Return the number of processes that the sizes call for."""
        return prod(self._sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Return how many shares of the data there are."""
        return prod(self._size(axis) for axis in _DATA_AXES)

    @property
    def non_data_parallel_size(self) -> int:
        """Return how many ranks work on one share of the data."""
        return prod(self._size(axis) for axis in _MODEL_AXES)

    @property
    def dp_dim_names(self) -> list[str]:
        """Return the axes in use that spread data."""
        return self._enabled(*_DATA_AXES)

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Return the axes in use that spread one share of the data, innermost first."""
        return self._enabled(*_MODEL_AXES)

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Return the axes in use over which weights are sharded."""
        return self._enabled(MeshAxis.DP_SHARD, MeshAxis.CP)

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Return the axes in use over which a loss is averaged."""
        return self._enabled(*_DATA_AXES, MeshAxis.CP)

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Return the axes of the mesh that sharded data parallelism works on."""
        return [*self._enabled(MeshAxis.DP_REPLICATE), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """Return all axes in use, those of data first."""
        return self.dp_dim_names + self.non_dp_dim_names

    def fit(self, world_size: int, ranks: str = "processes") -> None:
        """Check the sizes against the number of processes; sizes of 1 throughout mean replicas.

        Args:
            ranks: What there are `world_size` of, where one process drives several devices.

        Raises:
            ConfigurationError: If the product of the sizes is another number.
        """
        self._fill_handlers()
        if self.total_size == 1:
            self.dp_replicate_size = world_size
        if self.total_size != world_size:
            given = ", ".join(f"{axis}_size={size}" for axis, size in self.sizes.items() if size > 1)
            fitting = self._fitting(world_size)
            remedy = f"These would fit: {'; '.join(fitting)}" if fitting else f"Their product must be {world_size}"
            raise ConfigurationError(
                f"ParallelismConfig({given}) calls for {self.total_size} {ranks}, but there are {world_size}. {remedy}."
            )

    def _fitting(self, world_size: int) -> list[str]:
        """Return the layouts that fill the processes and differ from this one in one size only."""
        found = []
        for axis in (*_DATA_AXES, *_MODEL_AXES):
            size, rest = divmod(world_size, self.total_size // self._size(axis))
            is_free = axis is not MeshAxis.SP and not (axis is MeshAxis.CP and self.sp_enabled)
            if is_free and size > 0 and not rest:
                changed = {**self.sizes, axis.value: size}
                found.append(", ".join(f"{name}_size={count}" for name, count in changed.items() if count > 1))
        return [layout or "no axis at all" for layout in dict.fromkeys(found)]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make the mesh of the axes in use, with the joined axes "dp", "dp_shard_cp" and "dp_cp"; None without axes."""
        if self.sp_enabled and self.sp_backend == "deepspeed":
            return None  # DeepSpeed makes its own groups
        joined = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        # Read through the method, because a library that adds an axis also decides where it is.
        axes, sizes = self._get_mesh() or ((), ())
        return build_mesh(device_type, dict(zip(axes, sizes, strict=True)), joined)

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, made on first use.

        Raises:
            ConfigurationError: If no device type is known yet, or another one than the mesh has is asked for.
        """
        if self.device_mesh is not None and self.__dict__.get("_world") is not _world():
            del self.__dict__["device_mesh"]  # its process group was left
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigurationError(
                    "get_device_mesh() was called before there is a mesh, so it needs a device type. "
                    "Write get_device_mesh(accelerator.device.type)."
                )
            self.__dict__["device_mesh"] = self.build_device_mesh(device_type)
            self.__dict__["_world"] = _world()
        elif device_type is not None and self.device_mesh.device_type != device_type:
            raise ConfigurationError(
                f"The mesh has devices of type {self.device_mesh.device_type!r}, but {device_type!r} was asked for. "
                "Leave the argument out."
            )
        mesh: DeviceMesh | None = self.device_mesh
        return mesh

    def __getstate__(self) -> dict[str, Any]:
        # A mesh belongs to its process group, which goes into no file; a copy makes its own.
        return {name: value for name, value in self.__dict__.items() if name not in ("device_mesh", "_world")}

    def fsdp_mesh(self) -> DeviceMesh:
        """Return the part of the mesh on which weights are sharded, with an axis of replicas before it if there is one.

        Raises:
            ConfigurationError: If no axis shards weights.
        """
        if not self.dp_shard_cp_dim_names or self.device_mesh is None:
            raise ConfigurationError(
                f"{self!r} has no axis over which weights are sharded, but FSDP was asked for. "
                "Set dp_shard_size above 1, or leave the FSDP plugin out."
            )
        return submesh(self.device_mesh, *self.fsdp_dim_names)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value if isinstance(value, int | str | None) else vars(value) for name, value in plain.items()}


def _number(text: str) -> int | str:
    """Return the number that a text says, or the text itself, for a message, if it says none."""
    try:
        return int(text)
    except ValueError:
        return text


def _world() -> Any:
    """Return the process group of all ranks, None while there is none."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
