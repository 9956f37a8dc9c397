"""`notebook_launcher` in a real Jupyter kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import script_environment

nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient")
nbformat = pytest.importorskip("nbformat", reason="notebooks are made by nbformat")
pytest.importorskip("ipykernel", reason="notebooks need the kernel of Jupyter")

pytestmark = pytest.mark.multiprocess

DEFINE = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, notebook_launcher

inputs = torch.arange(32.0).reshape(32, 1) / 32
loss = torch.nn.functional.mse_loss(torch.nn.Linear(1, 1)(inputs), inputs)
loss.backward()  # the threads of autograd must not hold the children

def train(rate):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = DataLoader(TensorDataset(inputs, 3 * inputs), batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(4):
        for features, wanted in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(features), wanted))
            optimizer.step()
            optimizer.zero_grad()
    print(f"trained on rank {accelerator.process_index} of {accelerator.num_processes}")
    weight = accelerator.unwrap_model(model).weight.detach()
    return accelerator.process_index, accelerator.mixed_precision, weight

def fail_on_the_second():
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        raise ValueError("broken on purpose")
    accelerator.wait_for_everyone()

def die():
    os.kill(os.getpid(), 9)

def fail_once():
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.ones(1), "sum").item()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and accelerator.process_index == 0:
        raise ValueError("once")
    accelerator.wait_for_everyone()
    return attempt, total
"""
CELLS = {
    "define": DEFINE,
    "train": "pair = notebook_launcher(train, (0.1,), num_processes=2)\n"
    "print([rank for rank, _, _ in pair], torch.equal(pair[0][2], pair[1][2]))",
    "fail": "notebook_launcher(fail_on_the_second, num_processes=2)",
    "die": "notebook_launcher(die, num_processes=2)",
    "again": "print([precision for _, precision, _ in notebook_launcher("
    "train, (0.1,), num_processes=2, mixed_precision='bf16', rdzv_backend='c10d')])",
    "restart": "print(notebook_launcher(fail_once, num_processes=2, max_restarts=1))",
    "handlers": "import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)",
    "alone": "_, _, alone = notebook_launcher(train, (0.1,), num_processes=1)\n"
    "print(torch.allclose(alone, pair[0][2], atol=1e-6))",
    "refused": "notebook_launcher(train, (0.1,), num_processes=2)",
    "reset": "Accelerator().reset()",
    "early": "# a comment\naccelerator = Accelerator(cpu=True)",
    "too late": "notebook_launcher(train, (0.1,), num_processes=2)",
    "free again": "accelerator.reset()\nprint(len(notebook_launcher(train, (0.1,), num_processes=2)))",
    "group": "torch.distributed.init_process_group("
    "'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
    "try:\n    notebook_launcher(train, (0.1,), num_processes=2)\n"
    "finally:\n    torch.distributed.destroy_process_group()",
}


class Page:
    """A notebook that has run: what each cell printed, and the error in which it ended."""

    def __init__(self, cells: dict[str, Any]) -> None:
        self.cells = cells

    def printed(self, name: str) -> str:
        outputs = self.cells[name]["outputs"]
        assert not [output for output in outputs if output["output_type"] == "error"], outputs
        return "".join(out["text"] for out in outputs if out["output_type"] == "stream" and out["name"] == "stdout")

    def error(self, name: str) -> tuple[str, str]:
        (error,) = [output for output in self.cells[name]["outputs"] if output["output_type"] == "error"]
        return error["ename"], error["evalue"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Run all cells in one kernel; the tests below look at them."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    folder: Path = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        notebook, timeout=600, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=script_environment({"ACCELERATE_USE_CPU": "true"}))
    return Page(dict(zip(CELLS, notebook.cells, strict=True)))


def test_two_processes_train_and_their_results_come_back(page: Page) -> None:
    # Lines of two processes may run into each other.
    printed = page.printed("train")
    assert sorted(re.findall(r"trained on rank \d of 2", printed)) == [
        "trained on rank 0 of 2",
        "trained on rank 1 of 2",
    ]
    assert printed.splitlines()[-1] == "[0, 1] True"


def test_the_error_of_a_child_is_shown_with_its_traceback(page: Page) -> None:
    name, text = page.error("fail")
    assert name == "ProcessFailedError"
    assert re.match(r"rank 1 of 2 failed on \S+ \(local rank 1, process [1-9]\d*\): exit code 1\n", text)
    assert re.search(r"(?s)in fail_on_the_second.*ValueError: broken on purpose\s*$", text)


def test_a_child_that_is_killed_is_named(page: Page) -> None:
    name, text = page.error("die")
    assert name == "ProcessFailedError"
    assert "SIGKILL" in text


def test_a_second_call_works_and_hands_the_precision_on(page: Page) -> None:
    assert page.printed("again").splitlines()[-1] == "['bf16', 'bf16']"


def test_processes_that_were_in_a_group_are_started_anew_after_a_failure(page: Page) -> None:
    assert page.printed("restart").splitlines()[-1] == "[(1, 2.0), (1, 2.0)]"


def test_the_stop_button_still_works(page: Page) -> None:
    assert page.printed("handlers") == "True\n"


def test_one_process_runs_in_the_notebook_with_the_same_numbers(page: Page) -> None:
    assert page.printed("alone").splitlines() == ["trained on rank 0 of 1", "True"]


def test_a_state_that_is_there_already_is_refused_with_the_line_that_made_it(page: Page) -> None:
    name, text = page.error("refused")
    assert name == "ConfigurationError"
    # The kernel leaves out the empty line at the head of a cell.
    line = DEFINE.strip().splitlines().index("    accelerator = Accelerator(cpu=True)") + 1
    assert f"by line {line} of a cell, `accelerator = Accelerator(cpu=True)`" in text
    assert "by line 2 of a cell, `accelerator = Accelerator(cpu=True)`" in page.error("too late")[1]
    assert page.printed("free again").splitlines()[-1] == "2"


def test_a_process_group_that_is_there_already_is_refused(page: Page) -> None:
    name, text = page.error("group")
    assert name == "ConfigurationError"
    assert "has a process group (gloo)" in text
