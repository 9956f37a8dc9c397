"""The helpers for tests."""

from __future__ import annotations

import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.support.processes import run_group, script_environment

from accelerate import Accelerator, PartialState
from accelerate._base.imports import is_comet_ml_available
from accelerate.state import AcceleratorState
from accelerate.test_utils import testing
from accelerate.test_utils.self_check import CheckFailure, expect_close
from accelerate.test_utils.testing import TempDirTestCase
from accelerate.test_utils.training import RegressionDataset, RegressionModel


def test_the_package_does_not_load_torch() -> None:
    code = (
        "import sys, accelerate.test_utils as t; t.get_launch_command; t.execute_subprocess_async; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=script_environment(), check=False).returncode == 0


def test_every_listed_name_is_there() -> None:
    import accelerate.test_utils as package

    missing = [name for name in dir(package) if not hasattr(package, name)]
    assert missing == []


def test_launch_commands_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    command = testing.get_launch_command(num_processes=2, cpu=True, config_file=None, mixed_precision="bf16")
    assert command == ["accelerate", "launch", "--num_processes=2", "--cpu", "--mixed_precision=bf16"]
    assert testing.DEFAULT_LAUNCH_COMMAND[:2] == ["accelerate", "launch"]
    assert testing.path_in_accelerate_package("test_utils", "scripts", "test_script.py").is_file()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert (testing.pytest_xdist_worker_id(), testing.get_torch_dist_unique_port()) == (3, 29503)


def test_run_command() -> None:
    assert testing.run_command([sys.executable, "-c", "print('hello')"], return_stdout=True) == "hello\n"
    with pytest.raises(testing.SubprocessCallException, match="code 3") as raised:
        testing.run_command([sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    assert "why" in str(raised.value)


def test_execute_subprocess_async(capsys: pytest.CaptureFixture[str]) -> None:
    done = testing.execute_subprocess_async([sys.executable, "-c", "print('out')"])
    assert (done.returncode, done.stdout, done.stderr) == (0, ["out"], [])
    assert "out\n" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="broken here"):
        testing.execute_subprocess_async([sys.executable, "-c", "raise ValueError('broken here')"], quiet=True)
    with pytest.raises(RuntimeError, match="did not end within"):
        testing.execute_subprocess_async([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)


def test_requirements_skip_what_is_missing() -> None:
    def test() -> str:
        return "ran"

    assert testing.require_transformers(test)() == "ran"
    assert testing.require_torch_min_version(version="2.0")(test)() == "ran"
    for decorator in (testing.require_torch_min_version(version="99.0"), testing.skip):
        with pytest.raises(unittest.SkipTest):
            decorator(test)()
    with pytest.raises(ValueError, match="no version"):
        testing.require_torch_min_version(test)
    alone = testing.torch_device == "cpu"
    for decorator, runs in ((testing.require_cpu, alone), (testing.require_non_cpu, not alone)):
        if runs:
            assert decorator(test)() == "ran"
        else:
            with pytest.raises(unittest.SkipTest):
                decorator(test)()


def test_slow_needs_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_SLOW", "yes")
    assert testing.slow(lambda: "ran")() == "ran"
    monkeypatch.setenv("RUN_SLOW", "no")
    with pytest.raises(unittest.SkipTest):
        testing.slow(lambda: "ran")()


def test_temporary_folders_are_emptied_and_removed() -> None:
    places: list[Path] = []

    class Case(TempDirTestCase):
        def test_first(self) -> None:
            (self.tmpdir / "folder").mkdir()
            (self.tmpdir / "file").touch()
            places.append(self.tmpdir)

        def test_second(self) -> None:
            assert list(self.tmpdir.iterdir()) == []

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
    assert (result.testsRun, result.errors, result.failures) == (2, [], [])
    assert not places[0].exists()


def run_case(case: type[unittest.TestCase]) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])


def test_states_are_forgotten_after_a_test() -> None:
    class Case(testing.AccelerateTestCase):
        def test_it(self) -> None:
            Accelerator(cpu=True)
            assert PartialState().initialized

    run_case(Case)
    assert PartialState._shared_state == {}
    assert AcceleratorState._shared_state == {}


def test_mocks_end_with_their_test() -> None:
    class Case(testing.MockingTestCase):
        def test_it(self) -> None:
            self.add_mocks(mock.patch.object(sys, "platform", "first"))
            self.add_mocks([mock.patch.object(sys, "platform", "second")])
            assert sys.platform == "second"

    before = sys.platform
    run_case(Case)
    assert sys.platform == before


def test_the_device_of_the_tests_and_its_memory() -> None:
    kind, count, memory = testing.get_backend()
    assert (kind, count) == (testing.torch_device, testing.device_count)
    assert memory() == 0 or kind != "cpu"


@pytest.mark.parametrize(
    ("decorator", "runs"),
    [
        (testing.require_cuda, torch.cuda.is_available()),
        (testing.require_xpu, torch.xpu.is_available()),
        (testing.require_multi_device, torch.accelerator.device_count() > 1),
        (testing.require_fp8, False),
    ],
)
def test_requirements_of_devices(decorator: Callable[[Callable[[], str]], Callable[[], str]], runs: bool) -> None:
    if not runs and not torch.accelerator.is_available():
        with pytest.raises(unittest.SkipTest):
            decorator(lambda: "ran")()
    elif runs:
        assert decorator(lambda: "ran")() == "ran"


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_FLAG", "yes")
    assert testing.parse_flag_from_env("SOME_FLAG")
    assert testing.parse_flag_from_env("NO_SUCH_FLAG", default=True)
    monkeypatch.setenv("SOME_FLAG", "maybe")
    with pytest.raises(ValueError, match="maybe"):
        testing.parse_flag_from_env("SOME_FLAG")


@pytest.mark.skipif(is_comet_ml_available(), reason="comet_ml takes over other trackers")
def test_trackers_are_there() -> None:
    assert testing.require_trackers(lambda: "ran")() == "ran"


def test_a_difference_above_the_tolerance_fails_the_check() -> None:
    expect_close(torch.ones(2), torch.ones(2) + 1e-8, "weights", 1e-6)
    with pytest.raises(CheckFailure, match=r"weights differs by 0.5, which is more than 0.1"):
        expect_close(torch.ones(2), torch.tensor([1.0, 1.5]), "weights", 0.1)
    with pytest.raises(CheckFailure, match="nan"):
        expect_close(torch.ones(1), torch.tensor([float("nan")]), "weights", 0.1)


def test_assert_exception() -> None:
    def fail() -> None:
        raise ValueError("the text")

    with testing.assert_exception(ValueError, "text"):
        fail()
    with pytest.raises(AssertionError), testing.assert_exception(ValueError, "other"):
        fail()
    with pytest.raises(AssertionError), testing.assert_exception(ValueError):
        pass
    assert testing.capture_call_output(print, "hello") == "hello\n"


def _compare() -> tuple[bool, bool]:
    from accelerate.state import PartialState

    state = PartialState(cpu=True)
    own = torch.full((2,), float(state.process_index))
    return testing.are_the_same_tensors(torch.ones(2)), testing.are_the_same_tensors(own)


def test_are_the_same_tensors() -> None:
    assert run_group(_compare, 2) == [(True, False), (True, False)]


def test_the_small_task() -> None:
    data = RegressionDataset(length=8, seed=1)
    assert len(data) == 8
    assert float(data[3]["x"]) == float(RegressionDataset(length=8, seed=1)[3]["x"])
    height = RegressionModel(a=2, b=1)(torch.tensor([3.0]))
    assert height is not None
    assert height.item() == 7.0
