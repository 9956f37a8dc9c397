"""The toy device itself: what the other tests here rely on it for."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.support.toy_device import build, environment, on_toy
from torch.nn import functional


@on_toy(devices=2)
def test_devices_do_not_mix() -> None:
    tensor = torch.ones(3, device="toy:1")
    for other in (torch.ones(3), torch.ones(3, device="toy:0")):
        with pytest.raises(RuntimeError, match="toy:1"):
            tensor + other
        with pytest.raises(RuntimeError, match="toy:1"):
            torch.cat([tensor, other])
    assert (tensor + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]  # a number, as torch allows it
    assert tensor[torch.tensor([2])].tolist() == [1.0]
    with pytest.raises(RuntimeError, match="no device toy:2"):
        torch.ones(3, device="toy:2")


@on_toy(devices=2, memory=4096)
def test_memory_has_a_limit_and_is_counted() -> None:
    tensor = torch.empty(512, device="toy:1")
    assert torch.accelerator.memory_allocated(1) == 2048
    with pytest.raises(torch.OutOfMemoryError, match="toy:1 is out of memory: 4000 bytes wanted, 2048 of 4096 taken"):
        torch.empty(1000, device="toy:1")
    torch.empty(1000, device="toy:0")
    del tensor
    assert (torch.accelerator.memory_allocated(1), torch.accelerator.memory_reserved(1)) == (0, 2048)
    assert torch.accelerator.get_memory_info(1) == (2048, 4096)
    torch.empty(1000, device="toy:1")  # the cache is given back for it
    assert torch.accelerator.max_memory_allocated(1) == 4000
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info(1) == (4096, 4096)
    torch.toy.set_memory_limit(1, 100)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64, device="toy:1")


@on_toy()
def test_memory_that_was_not_written_holds_nan() -> None:
    assert torch.empty(4, device="toy").isnan().all()
    torch.ones(4, device="toy")
    assert torch.empty(4, device="toy").isnan().all()  # from the cache


@on_toy()
def test_a_copy_that_is_not_waited_for_comes_late() -> None:
    source = torch.ones(4).pin_memory()
    on_device = source.to("toy", non_blocking=True)
    source.fill_(2.0)
    assert on_device.tolist() == [2.0] * 4
    target = torch.zeros(4, pin_memory=True)
    target.copy_(on_device, non_blocking=True)
    assert target.tolist() == [0.0] * 4
    assert torch.toy.num_waiting(0) == 1
    torch.accelerator.synchronize()
    assert target.tolist() == [2.0] * 4
    assert not torch.zeros(4).is_pinned()


@on_toy()
def test_streams_wait_for_events_only() -> None:
    lane, source = torch.Stream(device="toy:0"), torch.ones(4).pin_memory()
    with lane:
        tensor = source.to("toy", non_blocking=True)
        done = torch.Event(device="toy:0", enable_timing=True)
        done.record(lane)
    assert tensor.isnan().all()  # the stream of the reader knows nothing of the lane
    torch.accelerator.current_stream().wait_event(done)
    assert tensor.tolist() == [1.0] * 4
    end = torch.accelerator.current_stream().record_event(torch.Event(device="toy:0", enable_timing=True))
    end.synchronize()
    assert end.query()
    assert done.elapsed_time(end) >= 0


@on_toy()
def test_memory_is_lost_to_a_stream_that_it_does_not_know_of() -> None:
    for known, expected in ((False, True), (True, False)):
        tensor, target = torch.ones(4, device="toy"), torch.zeros(4, pin_memory=True)
        lane = torch.Stream(device="toy:0")
        with lane:
            target.copy_(tensor, non_blocking=True)
        if known:
            tensor.record_stream(lane)
        del tensor
        torch.accelerator.synchronize()
        assert bool(target.isnan().all()) is expected


@on_toy(devices=2)
def test_each_device_draws_its_own_numbers() -> None:
    torch.manual_seed(5)
    expected, following = torch.rand(3), torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3, device="toy:0").cpu(), expected)
    assert torch.equal(torch.rand(3, device="toy:1").cpu(), expected)
    state = torch.toy.get_rng_state("toy:1")
    assert torch.equal(torch.rand(3, device="toy:1").cpu(), following)
    assert torch.equal(torch.rand(3), expected)  # no device has moved the CPU's
    torch.toy.set_rng_state(state, "toy:1")
    assert torch.equal(torch.rand(3, device="toy:1").cpu(), following)
    generator = torch.Generator(device="toy:1").manual_seed(5)
    assert generator.initial_seed() == 5
    assert torch.equal(torch.rand(3, device="toy:1", generator=generator).cpu(), expected)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="toy:1", generator=torch.Generator())


@on_toy()
def test_dropout_takes_numbers_of_the_device() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    dropped = functional.dropout(torch.ones(64, device="toy"), 0.5)
    torch.native_dropout(torch.ones(64, device="toy"), 0.5, True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(dropped.cpu(), functional.dropout(torch.ones(64), 0.5))


@on_toy()
def test_operators_give_the_numbers_of_the_cpu() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 3)]
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            model(torch.rand(2, 1, 8, 8).to(device)).square().mean().backward()
            optimizer.step()
        return [tensor.cpu() for tensor in model.state_dict().values()]

    for found, expected in zip(train("toy"), train("cpu"), strict=True):
        assert torch.equal(found, expected)


@on_toy(devices=2)
def test_tensors_are_saved_with_their_device() -> None:
    stream = io.BytesIO()
    tensor = torch.arange(6.0, device="toy:1")
    torch.save({"whole": tensor, "part": tensor[2:]}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert loaded["part"].device == torch.device("toy:1")
    assert loaded["part"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
    stream.seek(0)
    assert torch.load(stream, map_location="cpu", weights_only=True)["part"].tolist() == [2.0, 3.0, 4.0, 5.0]


@on_toy(processes=2)
def test_collectives_of_devices() -> None:
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    assert dist.Backend.default_device_backend_map["toy"] == "toy"
    dist.init_process_group("toy")

    def own(*values: float) -> torch.Tensor:
        return torch.tensor([value + 10 * rank for value in values], device=f"toy:{rank}")

    reduced = own(1.0)
    work = dist.all_reduce(reduced, async_op=True)
    (result,) = work.get_future().wait()
    assert (reduced.item(), result.device, result.item()) == (12.0, reduced.device, 12.0)
    sent = own(1.0)
    dist.broadcast(sent, 1)
    assert sent.tolist() == [11.0]
    whole = torch.empty(4, device=sent.device)
    dist.all_gather_single(whole, own(1.0, 2.0))
    assert whole.tolist() == [1.0, 2.0, 11.0, 12.0]
    half = torch.empty(1, device=sent.device)
    dist.reduce_scatter_single(half, own(1.0, 2.0))
    assert half.item() == [12.0, 14.0][rank]
    swapped = torch.empty(2, device=sent.device)
    dist.all_to_all_single(swapped, own(1.0, 2.0))
    assert swapped.tolist() == [[1.0, 11.0], [2.0, 12.0]][rank]
    parts = [torch.empty(1, device=sent.device) for _ in range(2)]
    dist.all_gather(parts, own(3.0))
    assert torch.cat(parts).tolist() == [3.0, 13.0]
    dist.gather(own(4.0), parts if rank == 0 else None)
    assert rank or torch.cat(parts).tolist() == [4.0, 14.0]
    dist.scatter(half, list(own(5.0, 6.0).split(1)) if rank == 1 else None, src=1)
    assert half.item() == [15.0, 16.0][rank]
    if rank == 0:
        dist.send(own(7.0), 1)
    else:
        dist.recv(half, 0)
        assert half.item() == 7.0
    names: list[str] = [""] * 2
    dist.all_gather_object(names, f"rank {rank}")
    assert names == ["rank 0", "rank 1"]
    dist.barrier(device_ids=[rank])
    with pytest.raises(RuntimeError, match="device type cpu"):
        dist.all_reduce(torch.ones(1))


@on_toy()
def test_nothing_keeps_a_tensor_that_is_gone() -> None:
    start = torch.accelerator.memory_allocated()
    tensor = torch.ones(16, device="toy")
    alive = weakref.ref(tensor)
    (tensor * 2).sum().item()
    del tensor
    assert alive() is None
    assert torch.accelerator.memory_allocated() == start


def test_a_program_has_the_device_without_knowing_of_it() -> None:
    program = "import torch; print(torch.accelerator.current_accelerator(), torch.toy.device_count())"
    run = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["toy", "2"]


@on_toy(devices=2)
def computes_a_gradient() -> None:
    weight = torch.ones(2, device="toy:1", requires_grad=True)
    (3 * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_what_the_test_process_did_before_does_not_matter() -> None:
    torch.ones(1, requires_grad=True).sum().backward()  # torch counts the devices of a process here
    computes_a_gradient()


def test_the_test_process_does_not_have_it() -> None:
    build()
    assert torch.accelerator.current_accelerator() is None
