"""The axes of a mesh of one rank, and steps for axes that are not in use."""

from __future__ import annotations

from tests.support.gpt import TinyGPT
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accelerate.parallel.mesh import averaging_group, axis_group, axis_rank, build_mesh, has_axis
from accelerate.parallel.tensor import tensor_parallel_step


class TestSteps:
    def test_an_axis_that_is_not_in_use_has_no_step(self, mesh: DeviceMesh) -> None:
        assert tensor_parallel_step(None) is None
        step = tensor_parallel_step(mesh)
        assert step is not None
        assert isinstance(step(TinyGPT()).head.weight, DTensor)  # type: ignore[union-attr]

    def test_axes_of_a_mesh(self, mesh: DeviceMesh) -> None:
        assert (has_axis(mesh, "tp"), has_axis(mesh, "cp"), has_axis(None, "tp")) == (True, False, False)
        assert (axis_rank(mesh, "tp"), axis_rank(mesh, "pp"), axis_rank(None, "tp")) == (0, 0, 0)
        assert axis_group(mesh, "tp") is not None
        assert axis_group(mesh, "cp") is averaging_group(mesh) is averaging_group(None) is None
        assert build_mesh("cpu", {"tp": 1}, {}) is None
