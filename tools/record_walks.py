"""Record which files of the package a request passes through, and show it in docs/explanation/architecture.md.

python -m tools.record_walks           rewrite the section between the markers
python -m tools.record_walks --check   fail if the page differs, or if a walk passes through more files than it may
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tools.pages import ROOT, write_sections

PACKAGE = ROOT / "src" / "accelerate"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
# These run inside the function in whose source they stand; later versions of Python give them no frame of their own.
_PARTS_OF_A_FUNCTION = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})


@dataclass(frozen=True)
class Guide:
    """How long a walk should be, and how long it may be.

    Args:
        heading: What the walk is, in a word or two.
        request: What is called.
        wanted: Files that the walk should pass through at most.
        allowed: Files that it may pass through; this number only falls, unless a new promise needs a file.
        reason: Why more than the wanted files are allowed, for the page.
    """

    heading: str
    request: str
    wanted: int
    allowed: int
    reason: str = ""


GUIDES = {
    "launch": Guide(
        "Launch",
        "`accelerate launch --cpu --num_processes 2 train.py`, until a worker starts",
        20,
        24,
        "five of its files are launchers, which are asked in turn whether the run is theirs; one reads with care what others "
        "wrote.",
    ),
    "construct": Guide(
        "Construction",
        "`Accelerator(...)`",
        12,
        17,
        "each of the four questions is answered by its registry and by the member that it finds, and each setting checks "
        "itself where it is declared.",
    ),
    "prepare": Guide(
        "Prepare",
        "`prepare(model, optimizer, loader, scheduler)`",
        10,
        13,
        "a loader takes five files: what is asked of it, the order, the sampler, the loader, and what it shows of torch's.",
    ),
    "step": Guide("A step", "`accumulate`, `backward`, `optimizer.step`, `scheduler.step`, `zero_grad`", 6, 6),
    "save": Guide(
        "Save",
        "`save_state(folder)`",
        14,
        26,
        "the way itself takes ten files, one keeps other runs out, and one looks for what a load would refuse; each of the others "
        "gives the state of one kind of object, or is a leaf that "
        "all share.",
    ),
    "load": Guide(
        "Load",
        "`load_state(folder)`",
        14,
        27,
        "as with a save, each kind of object takes its own state back; seven of its files see that none of them runs code, leads "
        "out of its folder, or harms otherwise.",
    ),
    "big": Guide(
        "A big model",
        "`init_empty_weights`, `load_checkpoint_and_dispatch` to the disk, a forward",
        14,
        18,
        "six of its files are leaves that all share: environment, vendors, atomic files, nested data, private torch, and the "
        "careful reading of what others wrote.",
    ),
}


@dataclass
class Walk:
    """The files that one request entered.

    Args:
        entries: File -> the function by which it was entered first, in the order of the walk.
        helpers: The same for files that only other threads entered.
        hops: Pairs of functions in different files of which one called the other, in the main thread. A call that is
            repeated counts once, so that the number does not depend on sizes and times.
    """

    entries: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)
    hops: int = 0

    @property
    def num_files(self) -> int:
        """Return how many files were entered."""
        return len(self.entries) + len(self.helpers)


class Recorder:
    """Watch calls of the package's functions; code that runs because a module is being imported does not count."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self._prefix = f"{package}{os.sep}"
        self._walk = Walk()
        self._hops: set[tuple[str, str]] = set()
        self._main = threading.get_ident()
        self._lock = threading.Lock()

    @contextmanager
    def recording(self) -> Iterator[Walk]:
        """Record until the end of the block, in this thread and in those that it starts."""
        self._walk, self._hops = Walk(), set()
        walk = self._walk
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        try:
            yield walk
        finally:
            self.stop()

    def stop(self) -> None:
        """Record no more."""
        sys.setprofile(None)
        threading.setprofile(None)
        with self._lock:
            walk, self._walk = self._walk, Walk()
            walk.hops = len(self._hops)
            for name in walk.helpers.keys() & walk.entries.keys():
                del walk.helpers[name]

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(self._prefix):
            return
        if frame.f_code.co_name in _PARTS_OF_A_FUNCTION or self._is_importing(frame):
            return
        file, function = self._place(frame)
        with self._lock:
            if threading.get_ident() != self._main:
                self._walk.helpers.setdefault(file, function)
                return
            self._walk.entries.setdefault(file, function)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._prefix):
            caller = caller.f_back
        calling_file, calling_function = self._place(caller) if caller is not None else ("", "")
        if calling_file != file:
            self._hops.add((f"{calling_file}:{calling_function}", f"{file}:{function}"))

    def _place(self, frame: FrameType) -> tuple[str, str]:
        """Return the file and the function of a frame, without the parts of functions that only some versions show."""
        code = frame.f_code
        parts = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "").split(".")  # Python 3.11
        while len(parts) > 1 and parts[-1] in _PARTS_OF_A_FUNCTION:
            parts.pop()
        return code.co_filename[len(self._prefix) :].replace(os.sep, "/"), ".".join(parts)

    def _is_importing(self, frame: FrameType) -> bool:
        """Whether the frame is the body of a module, or runs below one."""
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_name == "<module>" and at.f_code.co_filename.startswith(self._prefix):
                return True
            at = at.f_back
        return False


# --- the requests ----------------------------------------------------------------------------------------------------


def train(recorder: Recorder, folder: Path) -> dict[str, Walk]:
    """Record a small training run from its construction to the loading of its checkpoint."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate import Accelerator

    walks = {}
    with recorder.recording() as walks["construct"]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=str(folder))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4, shuffle=True)
    with recorder.recording() as walks["prepare"]:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for number, (inputs, targets) in enumerate(loader):
        # The fourth batch closes a window of two after objects have seen their first step.
        with recorder.recording() as walk, accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == 3:
            walks["step"] = walk
            break
    with recorder.recording() as walks["save"]:
        accelerator.save_state(str(folder / "checkpoint"))
    with recorder.recording() as walks["load"]:
        accelerator.load_state(str(folder / "checkpoint"))
    return walks


def run_big_model(recorder: Recorder, folder: Path) -> dict[str, Walk]:
    """Record a model whose weights stay on the disk, from its empty skeleton to its first output."""
    import torch
    from safetensors.torch import save_file

    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    def make() -> torch.nn.Module:
        layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))

    whole = make()
    save_file(whole.state_dict(), folder / "model.safetensors")
    with recorder.recording() as walk, torch.no_grad():
        with init_empty_weights():
            model = make()
        model = load_checkpoint_and_dispatch(
            model, str(folder / "model.safetensors"), device_map={"": "disk"}, offload_folder=str(folder / "offload")
        )
        output = model(torch.ones(1, 64))
    torch.testing.assert_close(output, whole(torch.ones(1, 64)))
    return {"big": walk}


def launch(recorder: Recorder, folder: Path) -> dict[str, Walk]:
    """Record the launcher's side of two processes, until it starts the first of them."""
    from accelerate.commands import accelerate_cli

    script = folder / "train.py"
    script.write_text("", encoding="utf-8")

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and str(script) in map(str, arguments[1]):
            recorder.stop()

    sys.addaudithook(on_event)
    with recorder.recording() as walk, suppress(SystemExit):
        accelerate_cli.run(["launch", "--cpu", "--num_processes", "2", str(script)])
    return {"launch": walk}


REQUESTS: dict[str, Callable[[Recorder, Path], dict[str, Walk]]] = {
    "launch": launch,
    "train": train,
    "big_model": run_big_model,
}


def import_package() -> None:
    """Import every module of the package and resolve its lazy names, so that no walk meets an import."""
    import accelerate

    for name in dir(accelerate):
        getattr(accelerate, name)
    for module in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if ".test_utils" in module.name or ".__main__" in module.name:
            continue
        try:
            importlib.import_module(module.name)
        except ImportError:  # a member that needs a package of its vendor
            continue


def record_here(request: str) -> dict[str, Walk]:
    """Carry out one request in this process, which must have seen none before."""
    import_package()
    with tempfile.TemporaryDirectory() as folder:
        return REQUESTS[request](Recorder(), Path(folder))


def record(request: str) -> dict[str, Walk]:
    """Carry out one request in a fresh process."""
    run = subprocess.run(
        [sys.executable, "-m", "tools.record_walks", "--record", request],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if run.returncode:
        raise RuntimeError(f"the request {request!r} failed\n{run.stdout}\n{run.stderr}")
    return {name: Walk(**walk) for name, walk in json.loads(run.stdout.splitlines()[-1]).items()}


def record_all() -> dict[str, Walk]:
    """Carry out every request and return the walks in the order of the guides."""
    found = {name: walk for request in REQUESTS for name, walk in record(request).items()}
    return {name: found[name] for name in GUIDES}


def _environment() -> dict[str, str]:
    """Return an environment in which nothing of this user, or of a launcher, changes a walk."""
    foreign = ("ACCELERATE_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    settings = {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1", "HF_HOME": "does-not-exist"}
    return kept | settings


# --- the page --------------------------------------------------------------------------------------------------------


def render(walks: dict[str, Walk]) -> str:
    """Return the section of the page."""
    lines = ["| way | what is called | files | guide | hops |", "|---|---|---:|---:|---:|"]
    for name, guide in GUIDES.items():
        walk = walks[name]
        lines.append(f"| {guide.heading} | {guide.request} | {walk.num_files} | {guide.wanted} | {walk.hops} |")
    lines += [f"\n{GUIDES[name].heading}: {GUIDES[name].reason}" for name in over_guide(walks) if GUIDES[name].reason]
    for name, guide in GUIDES.items():
        lines += ["", f"### {guide.heading}", ""]
        entries = [*walks[name].entries.items()]
        lines += [f"{number}. `{file}`: `{function}`" for number, (file, function) in enumerate(entries, start=1)]
        if walks[name].helpers:
            helpers = ", ".join(f"`{file}`: `{function}`" for file, function in sorted(walks[name].helpers.items()))
            lines += ["", f"In other threads: {helpers}."]
    return "\n".join(lines) + "\n"


def over_guide(walks: dict[str, Walk]) -> list[str]:
    """Return the walks that pass through more files than wanted."""
    return [name for name, guide in GUIDES.items() if walks[name].num_files > guide.wanted]


def too_long(walks: dict[str, Walk]) -> list[str]:
    """Return one sentence for each walk that passes through more files than it may."""
    return [
        f"{guide.heading} passes through {walks[name].num_files} files, at most {guide.allowed} are allowed"
        for name, guide in GUIDES.items()
        if walks[name].num_files > guide.allowed
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check the page and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page differs")
    parser.add_argument("--record", choices=REQUESTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.record:
        walks = record_here(options.record)
        print(json.dumps({name: vars(walk) for name, walk in walks.items()}))
        return 0
    walks = record_all()
    for name, walk in walks.items():
        print(f"{name}: {walk.num_files} files (guide {GUIDES[name].wanted}), {walk.hops} hops")
    problems = too_long(walks)
    stale = write_sections((PAGE,), "walks", render(walks), check=options.check)
    problems += [f"{page} shows other walks; run `make walks`" for page in stale if options.check]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
