"""The ranks that a launcher gave, as a record."""

from __future__ import annotations

import pytest

from accelerate.utils.environment import (
    CPUInformation,
    clear_environment,
    get_cpu_distributed_information,
    patch_environment,
)


def test_alone() -> None:
    with clear_environment():
        assert get_cpu_distributed_information() == CPUInformation(0, 1, 0, 1)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2},
        {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2},
        {
            "OMPI_COMM_WORLD_RANK": 3,
            "OMPI_COMM_WORLD_SIZE": 4,
            "OMPI_COMM_WORLD_LOCAL_RANK": 1,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        },
        {
            "MV2_COMM_WORLD_RANK": 3,
            "MV2_COMM_WORLD_SIZE": 4,
            "MV2_COMM_WORLD_LOCAL_RANK": 1,
            "MV2_COMM_WORLD_LOCAL_SIZE": 2,
        },
    ],
)
def test_ranks_of_a_launcher(variables: dict[str, int]) -> None:
    with clear_environment(), patch_environment(**variables):
        assert get_cpu_distributed_information() == CPUInformation(3, 4, 1, 2)
