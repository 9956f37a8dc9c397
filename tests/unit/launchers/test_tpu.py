"""A function of a notebook on XLA devices: where it runs, what is refused, and the installation of torch_xla."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.tpu_machines import write_torch_xla

from accelerate import Accelerator, launchers, notebook_launcher
from accelerate._base.errors import AccelerateError, ConfigurationError, MissingPackageError, UsageError
from accelerate.devices.machine import Machine
from accelerate.launch.host import Host
from accelerate.utils import install_xla

VARIABLES = (
    *("PJRT_DEVICE", "XLA_USE_SPMD", "CPU_NUM_DEVICES", "TPU_NAME", "TPU_VISIBLE_CHIPS"),
    *("ACCELERATE_USE_CPU", "USE_TORCH_XLA"),
)
Chips = Callable[[Sequence[int]], None]


@pytest.fixture
def chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chips:
    """Return a function that gives this machine the chips of a TPU, and a torch_xla that starts two processes."""
    write_torch_xla(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
        monkeypatch.delitem(sys.modules, name)
    for name in VARIABLES:
        # Set and deleted, so that what the launcher leaves is taken back after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def have(cores: Sequence[int]) -> None:
        monkeypatch.setattr(Host, "tpu_cores", lambda host, environment: list(cores))
        machine = Machine("xla", sum(cores)) if cores else Machine()
        monkeypatch.setattr(launchers, "detect", lambda environ: machine)

    have([1, 1])
    yield have
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_xla"]:
        del sys.modules[name]


def facts(word: str = "") -> dict[str, Any]:
    names = ("ACCELERATE_MIXED_PRECISION", "MIXED_PRECISION", "FORK_LAUNCHED", "STAND_IN_RANK", "XLA_USE_SPMD", "RANK")
    return {"word": word, "pid": os.getpid(), **{name: os.environ.get(name) for name in names}}


# --- a process for each device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_processes", [None, 2])
def test_each_device_has_a_process(chips: Chips, num_processes: int | None) -> None:
    found = notebook_launcher(facts, ("given",), num_processes, mixed_precision="bf16")
    assert [entry["STAND_IN_RANK"] for entry in found] == ["0", "1"]
    assert len({os.getpid(), *(entry["pid"] for entry in found)}) == 3
    for entry in found:
        assert (entry["word"], entry["FORK_LAUNCHED"]) == ("given", "1")
        assert (entry["ACCELERATE_MIXED_PRECISION"], entry["MIXED_PRECISION"]) == ("bf16", "bf16")
        # Ranks are those of torch_xla.
        assert (entry["RANK"], entry["XLA_USE_SPMD"]) == (None, None)
    assert os.environ["PJRT_DEVICE"] == "TPU"
    assert "FORK_LAUNCHED" not in os.environ


def returned(value: Any) -> Any:
    return value


def test_results(chips: Chips) -> None:
    assert notebook_launcher(returned, (None,)) is None
    found = notebook_launcher(returned, ({"weight": torch.ones(2)},))
    assert [entry["weight"].tolist() for entry in found] == [[1.0, 1.0]] * 2


def fail_on_one() -> None:
    if os.environ["STAND_IN_RANK"] == "1":
        raise ValueError("broken on purpose")
    import time

    time.sleep(600)


def test_the_first_failure_is_raised_and_ends_the_others(chips: Chips) -> None:
    with pytest.raises(
        launchers.ProcessFailedError, match=r"(?s)^rank 1 of 2 .*fail_on_one.*broken on purpose"
    ) as caught:
        notebook_launcher(fail_on_one)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


def test_processes_that_cannot_start_are_found_before_the_training(
    chips: Chips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "warp")
    with pytest.raises(launchers.ProcessFailedError, match=r"(?s)test_launch.*'warp'"):
        notebook_launcher(Path.touch, (tmp_path / "trained",))
    assert not (tmp_path / "trained").exists()


def test_what_cannot_be_sent_is_refused(chips: Chips) -> None:
    message = r"they cannot be sent: .*local.*. Define the function in a cell of its own"
    with pytest.raises(ConfigurationError, match=message):
        notebook_launcher(lambda: None)
    with pytest.raises(ConfigurationError, match=message):
        notebook_launcher(returned, (lambda: None,))


def test_a_state_that_the_processes_would_inherit_is_refused(chips: Chips) -> None:
    Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="An Accelerator, or another state of this library, was made"):
        notebook_launcher(facts)


# --- in the notebook --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "variables", "given"),
    [
        ([1, 1], {}, {"num_processes": 1}),
        ([1], {}, {}),
        ([2, 2], {}, {"num_processes": 1}),
        ([], {"PJRT_DEVICE": "CPU"}, {}),
        ([1, 1], {"XLA_USE_SPMD": "1"}, {}),
        ([2, 2], {"XLA_USE_SPMD": "1"}, {"num_processes": 1}),
        ([], {"TPU_NAME": "local"}, {"num_processes": 1}),
        ([], {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}, {"num_processes": 1}),
    ],
)
def test_one_process_is_the_notebook(
    chips: Chips, cores: list[int], variables: dict[str, str], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chips(cores)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = notebook_launcher(facts, mixed_precision="bf16", **given)
    assert (found["pid"], found["FORK_LAUNCHED"], found["ACCELERATE_MIXED_PRECISION"]) == (os.getpid(), None, "bf16")
    assert found["XLA_USE_SPMD"] == variables.get("XLA_USE_SPMD")


@pytest.mark.parametrize(("cores", "variables"), [([2] * 4, {}), ([], {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"})])
@pytest.mark.parametrize("num_processes", [None, 8])
def test_devices_that_share_a_process_are_driven_together(
    chips: Chips,
    cores: list[int],
    variables: dict[str, str],
    num_processes: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chips(cores)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = notebook_launcher(facts, (), num_processes)
    assert (found["pid"], found["XLA_USE_SPMD"]) == (os.getpid(), "1")
    told = capsys.readouterr().err
    assert told.startswith("notebook_launcher: this process drives all XLA devices together (SPMD), because ")
    assert told.endswith("; a batch is the global one, shared out among the devices.\n")
    # From now on it does, and says so once.
    assert notebook_launcher(facts)["pid"] == os.getpid()
    assert capsys.readouterr().err == ""


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "message"), [([1, 1], "set up 'xla' already"), ([2, 2], "can no longer drive all")])
def test_a_device_that_the_notebook_has_used_is_refused(
    chips: Chips, cores: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips(cores)
    import torch_xla

    used = SimpleNamespace(_xla_runtime_is_initialized=lambda: True)
    monkeypatch.setattr(torch_xla, "_XLAC", used)
    with pytest.raises(UsageError, match=rf"{message}.*Restart the kernel and move what touches the device"):
        notebook_launcher(facts)
    assert "XLA_USE_SPMD" not in os.environ
    assert notebook_launcher(facts, num_processes=1)["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("cores", "variables", "given", "message"),
    [
        (
            [1] * 4,
            {},
            {"num_processes": 2},
            r"num_processes=2, and torch_xla starts one process or .*this machine has 4 ",
        ),
        ([1] * 4, {}, {"num_processes": 8}, r"Leave num_processes out for all devices, or write 1"),
        ([1] * 4, {}, {"num_processes": 0}, r"num_processes=0 starts nothing"),
        ([1] * 4, {"XLA_USE_SPMD": "1"}, {"num_processes": 4}, r"num_processes=4 together with XLA_USE_SPMD=1"),
        (
            [1] * 4,
            {},
            {"mixed_precision": "fp16"},
            r"mixed_precision='fp16' on XLA devices.*Write mixed_precision='bf16'",
        ),
        ([1] * 4, {}, {"mixed_precision": "fp8"}, r"mixed_precision='fp8' on XLA devices"),
        ([1] * 4, {}, {"num_nodes": 2}, r"num_nodes=2 is about torch's agent.*Leave num_nodes out"),
        ([1] * 4, {}, {"max_restarts": 3}, r"max_restarts=3 is about torch's agent"),
        ([], {"TPU_NAME": "local"}, {}, r"asks for a TPU, and this machine lists no chip of one"),
        ([], {"PJRT_DEVICE": "TPU"}, {}, r"set PJRT_DEVICE=CPU for a trial run"),
        ([], {"PJRT_DEVICE": "WARP"}, {}, r"PJRT_DEVICE='WARP' names no device of torch_xla"),
        ([], {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "x"}, {}, r"CPU_NUM_DEVICES='x' is no number of devices"),
    ],
)
def test_what_cannot_work(
    chips: Chips,
    cores: list[int],
    variables: dict[str, str],
    given: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chips(cores)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        notebook_launcher(pytest.fail, ("it was called",), **given)


def test_a_plugin_says_itself_how_many_devices_there_are(chips: Chips, monkeypatch: pytest.MonkeyPatch) -> None:
    chips([])
    monkeypatch.setattr("accelerate.devices.xla._plugin_kinds", lambda: ("WARP",))
    monkeypatch.setenv("PJRT_DEVICE", "WARP")
    assert [entry["STAND_IN_RANK"] for entry in notebook_launcher(facts)] == ["0", "1"]
    with pytest.raises(ConfigurationError, match="only its plugin knows how many there are"):
        notebook_launcher(facts, num_processes=2)


@pytest.mark.parametrize(("name", "value"), [("ACCELERATE_USE_CPU", "1"), ("USE_TORCH_XLA", "0")])
def test_a_notebook_may_do_without_its_tpu(
    chips: Chips, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert notebook_launcher(facts, num_processes=1, mixed_precision="fp16")["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert "torch_xla" not in sys.modules


def test_no_torch_xla(chips: Chips, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(MissingPackageError, match=r"A notebook on XLA devices needs the package 'torch_xla'"):
        notebook_launcher(facts)


# --- installation -----------------------------------------------------------------------------------------------------

TORCH = ".".join(torch.__version__.split(".")[:2])


def test_elsewhere_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    with pytest.raises(RuntimeError, match=r"outside of a Colab notebook.*`pip install torch_xla`") as caught:
        install_xla()
    assert isinstance(caught.value, AccelerateError)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in Colab, with a Python that notes what it is told and fails if a file says so."""
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\nprintf \'%s\\n\' "$@" > words\n[ ! -e says ] || { cat says >&2; exit 1; }\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


@pytest.mark.parametrize(("upgrade", "more"), [(False, []), (True, ["--upgrade"])])
def test_colab_gets_the_release_that_belongs_to_its_torch(pip: Path, upgrade: bool, more: list[str]) -> None:
    install_xla(upgrade=upgrade)
    words = (pip / "words").read_text().splitlines()
    assert words == ["-m", "pip", "install", *more, f"torch_xla[tpu]=={TORCH}.*"]


@pytest.mark.parametrize(("says", "told"), [("a\nERROR: No matching\n\n", "ERROR: No matching"), ("", "no message")])
def test_pip_fails(pip: Path, says: str, told: str) -> None:
    (pip / "says").write_text(says)
    with pytest.raises(
        UsageError, match=rf"`pip install torch_xla\[tpu\]=={TORCH}.*` ended with exit code 1: {told}. A"
    ):
        install_xla()
