"""Every communicator passes the same checks, alone and in groups of one, two and three processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_group

from accelerate._base.errors import UsageError, WrongTypeError
from accelerate.collectives.base import Communicator, SoloCommunicator
from accelerate.collectives.torch_dist import TorchDistCommunicator

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.tolist() == expected.tolist()


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[rank, 1, 0], [rank + 2, rank, 1]]).to(dtype)


def gathers_every_dtype(group: Communicator) -> None:
    for dtype in DTYPES:
        rows = [row for rank in range(group.world_size) for row in values(rank, dtype).tolist()]
        found = group.gather(values(group.rank, dtype))
        assert (found.dtype, found.tolist()) == (dtype, rows)


def gathers_odd_layouts(group: Communicator) -> None:
    ranks = range(group.world_size)
    same(group.gather(torch.tensor(group.rank)), torch.tensor(list(ranks)))
    same(group.gather(torch.tensor(group.rank % 2 == 0)), torch.tensor([rank % 2 == 0 for rank in ranks]))
    same(
        group.gather(values(group.rank, torch.int64).t()), torch.cat([values(rank, torch.int64).t() for rank in ranks])
    )
    strided = torch.arange(12.0).reshape(3, 4)[:, ::2] + group.rank
    same(group.gather(strided), torch.cat([torch.arange(12.0).reshape(3, 4)[:, ::2] + rank for rank in ranks]))
    expanded = torch.tensor([[float(group.rank)]]).expand(2, 3)
    same(group.gather(expanded), torch.cat([torch.full((2, 3), float(rank)) for rank in ranks]))
    same(group.gather(torch.empty(0, 3)), torch.empty(0, 3))
    same(group.gather(torch.empty(2, 0, dtype=torch.int16)), torch.empty(2 * group.world_size, 0, dtype=torch.int16))
    conjugate = torch.tensor([1 + 2j * (group.rank + 1)]).conj()
    same(group.gather(conjugate), torch.tensor([1 - 2j * (rank + 1) for rank in ranks]))


def gathers_uneven_tensors(group: Communicator) -> None:
    for dtype in DTYPES:
        found = group.gather_uneven(values(group.rank, dtype)[: group.rank % 3])
        assert len(found) == group.world_size
        for rank, tensor in enumerate(found):
            same(tensor, values(rank, dtype)[: rank % 3])
    deep = torch.arange(group.rank + 2).reshape([1] * 10 + [-1])
    for rank, tensor in enumerate(group.gather_uneven(deep)):
        same(tensor, torch.arange(rank + 2).reshape([1] * 10 + [-1]))
    for rank, tensor in enumerate(group.gather_uneven(torch.tensor(float(group.rank)))):
        same(tensor, torch.tensor(float(rank)))
    for tensor in group.gather_uneven(torch.empty(0, 5)):
        same(tensor, torch.empty(0, 5))


def uneven_results_do_not_share_memory(group: Communicator) -> None:
    if group.world_size > 1:
        found = group.gather_uneven(torch.ones(2 + group.rank))
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found)


def reduces_every_dtype(group: Communicator) -> None:
    world = group.world_size
    floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn}
    for dtype in set(DTYPES) - {torch.bool, torch.complex64, torch.complex128}:
        stacked = torch.stack([values(rank, dtype).to(torch.float64) for rank in range(world)])
        own = values(group.rank, dtype)
        same(group.reduce(own, "sum"), stacked.sum(0).to(dtype))
        same(group.reduce(own, "mean"), stacked.mean(0).to(dtype if dtype in floats else torch.float32))
        if dtype != torch.uint64:
            same(group.reduce(own, "max"), stacked.amax(0).to(dtype))
            same(group.reduce(own, "min"), stacked.amin(0).to(dtype))
        same(own, values(group.rank, dtype))


def reduces_bool_and_complex(group: Communicator) -> None:
    ranks = range(group.world_size)
    flags = torch.tensor([group.rank == 0, True, False])
    same(group.reduce(flags, "sum"), torch.tensor([1, group.world_size, 0]))
    same(group.reduce(flags, "max"), torch.tensor([True, True, False]))
    same(group.reduce(flags, "min"), torch.tensor([group.world_size == 1, True, False]))
    same(group.reduce(flags, "mean"), torch.tensor([1 / group.world_size, 1.0, 0.0]))
    wave = torch.tensor([complex(group.rank, 1)])
    same(group.reduce(wave, "sum"), torch.tensor([complex(sum(ranks), group.world_size)]))
    same(group.reduce(wave, "mean"), torch.tensor([complex(sum(ranks) / group.world_size, 1)]))
    same(group.reduce(torch.tensor(2), "sum"), torch.tensor(2 * group.world_size))
    same(group.reduce(torch.empty(0), "sum"), torch.empty(0))
    same(group.reduce(torch.ones(2, 3).t(), "sum"), torch.full((3, 2), float(group.world_size)))


def a_mean_of_halves_does_not_overflow(group: Communicator) -> None:
    same(group.reduce(torch.full((1,), 60000.0, dtype=torch.float16), "mean"), torch.full((1,), 60000.0).half())
    same(group.reduce(torch.tensor([2**31 - 1], dtype=torch.int32), "mean"), torch.tensor([float(2**31 - 1)]))


def broadcasts_in_place(group: Communicator) -> None:
    last = group.world_size - 1
    for dtype in DTYPES:
        own = values(group.rank, dtype)
        assert group.broadcast(own, last) is own
        same(own, values(last, dtype))
    base = torch.zeros(4, 4)
    view = base[:, ::2]
    view += group.rank + 1
    assert group.broadcast(view, last) is view
    same(base[:, ::2], torch.full((4, 2), float(last + 1)))
    same(base[:, 1::2], torch.zeros(4, 2))
    weight = torch.nn.Parameter(torch.tensor(float(group.rank)))
    same(group.broadcast(weight, last).detach(), torch.tensor(float(last)))
    assert weight.requires_grad


def exchanges_objects(group: Communicator) -> None:
    last = group.world_size - 1
    assert group.gather_object({"rank": group.rank}) == [{"rank": rank} for rank in range(group.world_size)]
    assert group.gather_object("x" * group.rank * 5000) == ["x" * rank * 5000 for rank in range(group.world_size)]
    for length in (1, 2000, *range(2020, 2044), 70_000):
        text = bytes([group.rank]) * length
        assert group.gather_object(text) == [bytes([rank]) * length for rank in range(group.world_size)]
        received = [text, group.rank]
        group.broadcast_objects(received, last)
        assert received == [bytes([last]) * length, last]
    tensors = group.gather_object(torch.full((2,), float(group.rank)))
    assert [tensor.tolist() for tensor in tensors] == [[float(rank)] * 2 for rank in range(group.world_size)]


def waits(group: Communicator) -> None:
    group.barrier()
    assert group.rank in range(group.world_size)


CHECKS: list[Callable[[Communicator], None]] = [
    gathers_every_dtype,
    gathers_odd_layouts,
    gathers_uneven_tensors,
    uneven_results_do_not_share_memory,
    reduces_every_dtype,
    reduces_bool_and_complex,
    a_mean_of_halves_does_not_overflow,
    broadcasts_in_place,
    exchanges_objects,
    waits,
]


def refuses_what_it_cannot_exchange(group: TorchDistCommunicator) -> None:
    for operation in (group.gather, group.gather_uneven, group.broadcast, lambda tensor: group.reduce(tensor, "sum")):
        for tensor in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
            with pytest.raises(WrongTypeError, match="a collective was given a tensor"):
                operation(tensor)
    with pytest.raises(WrongTypeError, match="no order"):
        group.reduce(torch.ones(1, dtype=torch.complex64), "max")
    with pytest.raises(WrongTypeError, match=r"torch\.uint64"):
        group.reduce(torch.ones(1, dtype=torch.uint64), "max")


def refuses_a_dtensor(group: TorchDistCommunicator) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    spread = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (group.world_size,)), [Replicate()])
    with pytest.raises(WrongTypeError, match="full_tensor"):
        group.gather(spread)


def an_object_that_does_not_pickle_fails_on_every_rank(group: TorchDistCommunicator) -> None:
    bad = (lambda: None) if group.rank == group.world_size - 1 else 1
    with pytest.raises(WrongTypeError, match=rf"rank\(s\) \[{group.world_size - 1}\] cannot be pickled"):
        group.gather_object(bad)
    with pytest.raises(WrongTypeError, match="cannot be pickled"):
        group.broadcast_objects([bad], group.world_size - 1)
    assert group.gather_object(1) == [1] * group.world_size


def a_backend_without_flat_gather_works(group: TorchDistCommunicator) -> None:
    group._gathers_flat = False
    gathers_every_dtype(group)
    gathers_uneven_tensors(group)


def a_subgroup_counts_its_own_ranks(group: TorchDistCommunicator) -> None:
    if group.world_size < 3:
        return
    members = [1, 2]
    handle = dist.new_group(members)
    if group.rank in members:
        pair = TorchDistCommunicator(handle)
        assert (pair.rank, pair.world_size) == (group.rank - 1, 2)
        assert pair.broadcast(torch.tensor([group.rank]), source=0).tolist() == [1]
        received = [group.rank]
        pair.broadcast_objects(received, source=1)
        assert received == [2]
        assert pair.gather(torch.tensor([group.rank])).tolist() == members
    group.barrier()


def every_check_in_a_group() -> list[str]:
    dist.init_process_group("gloo")
    group = TorchDistCommunicator()
    assert isinstance(group, Communicator)
    own = [
        refuses_what_it_cannot_exchange,
        refuses_a_dtensor,
        an_object_that_does_not_pickle_fails_on_every_rank,
        a_backend_without_flat_gather_works,
        a_subgroup_counts_its_own_ranks,
    ]
    passed = []
    for check in [*CHECKS, *own]:
        check(group)
        passed.append(check.__name__)
    return passed


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_solo(check: Callable[[Communicator], None]) -> None:
    assert isinstance(SoloCommunicator(), Communicator)
    check(SoloCommunicator())


@pytest.mark.multiprocess
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torch_distributed(world_size: int) -> None:
    results = run_group(every_check_in_a_group, world_size)
    assert len(results) == world_size
    assert all(len(passed) == len(CHECKS) + 5 for passed in results)


def test_a_group_is_needed() -> None:
    with pytest.raises(UsageError, match="no process group"):
        TorchDistCommunicator()
