"""A folder belongs to one process until that one ends."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.disks import fill_up, mounted
from tests.support.processes import run_group, script_environment

from accelerate._base.errors import CheckpointError
from accelerate.runtime import claims
from accelerate.runtime.atomic import Owner
from accelerate.runtime.claims import Holder

HOLD = """
import sys
from pathlib import Path
from accelerate.runtime import claims
claims.claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def hold_nothing_afterwards() -> Iterator[None]:
    yield
    claims.release()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who lives has to be waited for in vain here."""
    monkeypatch.setattr(claims, "_SECONDS_TO_DIE", 0.2)
    monkeypatch.setattr(claims, "_SECONDS_OF_SILENCE", 0.2)


def written_by(folder: Path, holder: Holder, beat: int | None = 0) -> None:
    """Claim a folder for somebody else."""
    file = claims._file_of(folder)
    file.write_text(holder.to_json())
    if beat is not None:
        holder.pulse_beside(file).write_text(str(beat))


def elsewhere(run: str = "feed0001") -> Holder:
    return Holder(replace(Owner.this_process(), host="far-away", process=7, place="0123abcd"), run)


def test_a_claim_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "state"
    for _ in range(2):
        claims.claim(folder)
    (file,) = folder.parent.glob(".state.*")
    facts = json.loads(file.read_text())
    assert (facts["host"], facts["process"]) == (Owner.this_process().host, os.getpid())
    assert len(list(folder.parent.glob(".accelerate-pulse-*"))) == 1
    claims.check(folder)
    claims.release()
    assert list(folder.parent.iterdir()) == []
    assert "accelerate-pulse" not in {thread.name for thread in threading.enumerate()}


def test_another_process_is_refused_until_it_ends(tmp_path: Path, impatient: None) -> None:
    folder = tmp_path / "state"
    command = [sys.executable, "-c", HOLD, str(folder)]
    environment = script_environment()
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"'{folder}' is in use: process {other.pid} on "):
            claims.claim(folder)
        claims.claim(tmp_path / "another")
        other.kill()
        other.wait()
        claims.claim(folder)
    claims.check(folder)
    # What the killed one left is gone.
    claims.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "state")]
    subprocess.run(command, env=script_environment(), input="", check=True, capture_output=True, text=True)
    assert list(tmp_path.iterdir()) == []


def claim_in_a_child(folder: str) -> list[str]:
    """Claim what the parent holds."""
    claims.claim(Path(folder))
    claims.check(Path(folder))
    return [entry.name for entry in Path(folder).parent.glob(".*")]


def test_a_process_that_this_one_starts_may_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    claims.claim(folder)
    (found,) = run_group(claim_in_a_child, 1, str(folder))
    assert len(found) == 3  # the claim, and a pulse of each
    # Processes of multiprocessing end without the functions of `atexit`.
    assert not claims._file_of(folder).exists()
    claims.claim(folder)
    claims.check(folder)


def test_a_forked_process_does_not_give_up_what_its_parent_holds(tmp_path: Path) -> None:
    claims.claim(tmp_path / "state")
    run_group(claims.release, 1)
    assert claims._file_of(tmp_path / "state").exists()


def test_a_holder_elsewhere_lives_while_its_pulse_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, holder = tmp_path / "state", elsewhere()
    written_by(folder, holder)
    signs, beats = Holder.signs_of_life, iter(range(1, 1000))

    def look(self: Holder, file: Path) -> list[bytes]:
        found = signs(self, file)
        written_by(folder, holder, next(beats))
        return found

    monkeypatch.setattr(Holder, "signs_of_life", look)
    with pytest.raises(CheckpointError, match="process 7 on 'far-away'"):
        claims.claim(folder)
    assert "cannot be seen from here: waiting for a sign of life for up to 60 s" in caplog.text


@pytest.mark.parametrize("beat", [0, None])
def test_a_holder_elsewhere_whose_pulse_stands_still_is_dead(tmp_path: Path, impatient: None, beat: int | None) -> None:
    written_by(tmp_path / "state", elsewhere(), beat)
    claims.claim(tmp_path / "state")
    claims.check(tmp_path / "state")


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "{",
            "[]",
            '{"owner": "nobody", "run": 1}',
            '{"owner": 1, "run": 1}',
            "[" * 9000,
            "9" * 9000,
            "x" * 10_001,
        ),
        f'{{"owner": "{Owner.this_process().host}-{2**31}", "run": "0"}}',
        *(f'{{"owner": "a-1.{"9" * 30}.0", "run": "0"}}', '{"owner": "a/b-1", "run": "0"}'),
        *('{"owner": "a\\u0000b-1", "run": "0"}', '{"owner": "\\ud800-1", "run": "0"}'),
        *(f'{{"owner": "{"x" * 300}-1", "run": "0"}}', f'{{"owner": "a-1", "run": "{"0" * 300}"}}'),
        *('{"owner": "a-1.1.b", "run": "../../x"}', '{"owner": "a-1.1.b", "run": 1}'),
    ],
    ids=len,
)
def test_a_claim_that_was_cut_is_nobodys(tmp_path: Path, impatient: None, content: str) -> None:
    claims._file_of(tmp_path / "state").write_text(content)
    claims.claim(tmp_path / "state")
    claims.check(tmp_path / "state")


def make_special(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "dangling": "nowhere/x", "loop": path.name}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "dangling", "loop"])
def test_a_claim_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    file = claims._file_of(tmp_path / "state")
    make_special(file, kind)
    with pytest.raises(CheckpointError, match=rf"'{file}' is a .*is expected there.*Remove it, or save into another"):
        claims.claim(tmp_path / "state")
    assert claims.other_run(tmp_path / "state") is None
    # The neighbours of such a claim do not mind it.
    claims.claim(tmp_path / "other")
    claims.check(tmp_path / "other")


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "dangling"])
def test_a_pulse_that_is_no_file_is_no_sign_of_life(tmp_path: Path, impatient: None, kind: str) -> None:
    written_by(tmp_path / "state", elsewhere(), None)
    make_special(elsewhere().pulse_beside(claims._file_of(tmp_path / "state")), kind)
    claims.claim(tmp_path / "state")
    claims.check(tmp_path / "state")


def test_a_claim_that_becomes_no_file_can_be_given_up(tmp_path: Path) -> None:
    claims.claim(tmp_path / "state")
    file = claims._file_of(tmp_path / "state")
    file.unlink()
    make_special(file, "pipe")
    with pytest.raises(CheckpointError, match="Remove it"):
        claims.check(tmp_path / "state")
    claims.release()
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]


def test_a_claim_that_changes_hands_while_one_waits_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    written_by(folder, elsewhere())

    def give_up(condition: Any, seconds: float) -> bool:
        claims._file_of(folder).unlink(missing_ok=True)
        return True

    monkeypatch.setattr(claims, "_happens", give_up)
    claims.claim(folder)
    claims.check(folder)


def test_one_that_stood_still_finds_that_its_folder_is_anothers(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    claims.claim(folder)
    written_by(folder, elsewhere())
    with pytest.raises(CheckpointError, match="was taken over by process 7 on 'far-away'"):
        claims.check(folder)
    claims.release()
    assert claims.Holder.read(claims._file_of(folder)) == elsewhere()


def test_a_claim_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "state"
    claims.claim(folder)
    claims._file_of(folder).unlink()
    claims.check(folder)
    assert claims._file_of(folder).exists()
    shutil.rmtree(folder.parent)
    claims.check(folder)  # what is done next tells
    claims.claim(folder)
    assert claims._file_of(folder).exists()


def test_a_block_holds_what_was_not_held_before(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with claims.claimed(folder):
        assert claims._file_of(folder).exists()
    assert list(tmp_path.iterdir()) == []
    claims.claim(folder)
    with claims.claimed(folder), claims.claimed(tmp_path / "other"):
        pass
    assert [entry.name for entry in tmp_path.glob("*claim")] == [".state.accelerate-claim"]
    assert len(list(tmp_path.glob(".accelerate-pulse-*"))) == 1


def test_where_no_claim_can_be_written_the_save_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    claims.claim(tmp_path / "file" / "state")
    claims.check(tmp_path / "file" / "state")
    assert "could not be claimed, so other runs are not kept out of it" in caplog.text


def test_on_a_full_disk_no_claim_is_left_that_names_nobody(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        fill_up(disk)
        claims.claim(disk / "state")
        assert [entry.name for entry in disk.iterdir()] == ["filler"]
        (disk / "filler").unlink()
        claims.claim(disk / "state")
        claims.check(disk / "state")
        claims.release()


def test_a_folder_that_is_a_disk_holds_its_own_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside it is on another disk, which another machine need not see."""
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    claims.claim(tmp_path)
    assert (tmp_path / ".accelerate-claim").is_file()


def test_the_pulse_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_SECONDS_BETWEEN_PULSES", 0.01)
    claims.claim(tmp_path / "deep" / "state")
    (pulse,) = (tmp_path / "deep").glob(".accelerate-pulse-*")
    before = pulse.read_text()
    assert claims._happens(lambda: pulse.read_text() > before, 60)
    shutil.rmtree(tmp_path / "deep")
    claims.claim(tmp_path / "state")
    (pulse,) = tmp_path.glob(".accelerate-pulse-*")
    assert claims._happens(lambda: pulse.read_text() > before, 60)


def test_nobody_waits_for_a_process_that_is_known_to_have_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_happens", None)
    dead = replace(Owner.this_process(), started=1)
    assert dead.is_alive() is False
    written_by(tmp_path / "state", Holder(dead, "feed0001"))
    with caplog.at_level(logging.WARNING):
        claims.claim(tmp_path / "state")
    assert caplog.text == ""


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    pulse = claims._own().holder.pulse_beside(claims._file_of(tmp_path / "state"))
    pulse.symlink_to(victim)
    with pytest.raises(CheckpointError, match=re.escape(repr(str(pulse)))):
        claims.claim(tmp_path / "state")
    assert victim.read_text() == "precious"


def make_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to, make_pipe])
def test_a_link_or_pipe_planted_later_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(claims, "_SECONDS_BETWEEN_PULSES", 0.01)
    claims.claim(tmp_path / "state")
    claims.claim(tmp_path / "another" / "state")
    (pulse,), (other,) = tmp_path.glob(".accelerate-pulse-*"), (tmp_path / "another").glob(".accelerate-pulse-*")
    pulse.unlink()
    link(pulse, victim)
    before = other.read_text()
    assert claims._happens(lambda: other.read_text() > before, 60)  # beats follow one another in this order
    later = other.read_text()
    assert claims._happens(lambda: other.read_text() > later, 60)
    assert victim.read_text() == "precious"
