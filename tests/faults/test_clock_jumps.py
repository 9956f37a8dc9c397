"""A clock that jumps back and forth during a run: nothing that is saved, found, removed or waited for depends on it."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.launching import launch

from accelerate._base.constants import PREEMPTED_EXIT_CODE
from accelerate.checkpointing.catalog import catalog, newest_valid

pytestmark = pytest.mark.multiprocess

STEPS = 5_000  # of each rank, if nobody stops them: far more than the ranks need to agree on a stop

# The clock of the wall, and no other, is ahead by as many seconds as a file says, which all processes have mapped.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long long *ahead;

__attribute__((constructor)) static void start(void) {
    int file = open(getenv("CLOCK_FILE"), O_RDONLY);
    ahead = mmap(NULL, sizeof(*ahead), PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""

TRAIN = """
import json, os, signal, struct, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

here = Path(sys.argv[1])
set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration(project_dir=str(here / "run"), automatic_checkpoint_naming=True, total_limit=2)
)
named = Accelerator(project_dir=str(here / "named"))
rank = accelerator.process_index
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loader = DataLoader(torch.zeros(4 * int(sys.argv[2]), 1), batch_size=2, shuffle=True, num_workers=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
named.prepare(torch.nn.Linear(1, 1))
jumps = [400 * 86400, -800 * 86400, 3600, -60, 0, 7 * 86400]
found = {"moments": [], "kept": [], "was stopped": False}
assert not accelerator.should_stop
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.should_stop:
        found["was stopped"] = True
        break
    if step < len(jumps):
        accelerator.wait_for_everyone()
        if rank == 0:
            ahead = sum(jumps[: step + 1])
            with open(os.environ["CLOCK_FILE"], "r+b") as file:
                file.write(struct.pack("q", ahead))
        accelerator.wait_for_everyone()
        found["moments"].append(time.time())
        accelerator.save_state(blocking=step % 2 == 0)
        named.save_state(here / "named" / "zyxwvu"[step])
        accelerator.wait_for_save()
        found["kept"].append([info.name for info in accelerator.checkpoints()])
    elif rank == 1 and not found.get("signalled"):
        found["signalled"] = True
        os.kill(os.getpid(), signal.SIGTERM)
found["stopped"] = accelerator.progress.step
accelerator.load_state()
found["loaded"] = accelerator.progress.step
(here / f"found-{rank}").write_text(json.dumps(found))
if found["was stopped"]:
    accelerator.exit_for_restart()
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of programs whose clock is ahead by what a file says."""
    if shutil.which("gcc") is None:
        pytest.skip("the clock is compiled by gcc")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    (folder / "ahead").write_bytes(bytes(8))
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(folder / "clock.so"), str(folder / "clock.c"), "-ldl"]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("the clock cannot be compiled here")
    return {"LD_PRELOAD": str(folder / "clock.so"), "CLOCK_FILE": str(folder / "ahead")}


def test_a_run_whose_clock_jumps_saves_finds_and_stops_as_ever(tmp_path: Path, clock: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = (str(tmp_path / "train.py"), str(tmp_path), str(STEPS))
    done = launch("--cpu", "--num_processes", "2", *words, env=clock)
    assert done.returncode == PREEMPTED_EXIT_CODE, done.stderr
    first, second = (json.loads((tmp_path / f"found-{rank}").read_text()) for rank in (0, 1))
    moments = first["moments"]
    assert [later - earlier > 0 for earlier, later in pairwise(moments)].count(False) == 2
    # The newest two stay, whatever their dates are.
    names = [f"checkpoint_{number}" for number in range(len(moments))]
    assert first["kept"] == [names[max(0, count - 2) : count] for count in range(1, len(names) + 1)]
    # The newest is taken, also where names say nothing of their order.
    assert first["loaded"] == second["loaded"] == len(moments)
    # The signal that one rank got stops both, at one step, long before they are through.
    assert first["was stopped"]
    assert second["was stopped"]
    assert len(moments) < first["stopped"] == second["stopped"] < STEPS
    assert [info.name for info in catalog(tmp_path / "named")] == list("zyxwvu")
    choice = newest_valid(tmp_path / "named").value
    assert choice is not None
    assert choice.name == "u"
    assert not list(tmp_path.rglob(".*"))
