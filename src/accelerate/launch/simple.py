"""One process: the script takes the launcher's place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.helpers import Choice
from accelerate.launch.command import script_command, worker_environment
from accelerate.launch.meeting import fixed_port, on_this_machine
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

name = "one process"

# These share work between ranks and set up a process group for any number of them.
_GROUP_OPTIONS = ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm")


def accepts(config: RunConfig, site: Site) -> Choice[bool]:
    """Accept what no other launcher took."""
    return Choice(True, "one process on one machine")


def plan(config: RunConfig, site: Site) -> LaunchPlan:
    """Run the script in the place of the launcher."""
    values = worker_environment(config, site, 1)
    notes: tuple[str, ...] = ()
    if any(config[option] for option in _GROUP_OPTIONS):
        point = on_this_machine(config, site)
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        values |= {**ranks, "MASTER_ADDR": point.address, "MASTER_PORT": str(fixed_port(point, site))}
        notes = point.notes
    return LaunchPlan("exec", script_command(config, site), values, notes, launcher=name)
