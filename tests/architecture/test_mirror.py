"""The unit tests mirror the package: a test stands where the file stands that it is of."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, UNIT_TESTS = ROOT / "src" / "accelerate", ROOT / "tests" / "unit"
# Not of the package: the tools, and what tests share.
OTHER_FOLDERS = {"tools", "support"}
# Subjects that are told by several files of their folder.
SUBJECTS = {
    "commands/test_launch_parser.py",
    "commands/test_questionnaire.py",
    "config/test_deepspeed_launch.py",
    "config/plugins/test_parallelism_and_quantization.py",
    "config/plugins/test_precedence.py",
    "devices/test_availability.py",
    "hooks/test_hooks.py",
    "launch/test_plans.py",
    "offload/test_loading_again.py",
    "offload/test_memory_while_running.py",
    "runtime/test_profile.py",
    "strategies/test_fsdp_public.py",
    "test_launcher_environments.py",
    "tracking/test_package_calls.py",
    "tracking/test_packages.py",
    "utils/test_surface.py",
}


def test_every_unit_test_is_named_after_a_file_of_the_package() -> None:
    strays = []
    for path in sorted(UNIT_TESTS.rglob("test_*.py")):
        place = path.relative_to(UNIT_TESTS)
        if place.parts[0] in OTHER_FOLDERS or place.as_posix() in SUBJECTS:
            continue
        module = PACKAGE / place.parent / place.stem.removeprefix("test_")
        if not (module.with_suffix(".py").exists() or (module / "__init__.py").exists()):
            strays.append(place.as_posix())
    assert strays == [], "name each after the file that it tests, or list it among the subjects of several files"


def test_every_folder_of_unit_tests_is_one_of_the_package() -> None:
    folders = {path.parent.relative_to(UNIT_TESTS) for path in UNIT_TESTS.rglob("test_*.py")}
    assert [
        folder
        for folder in folders
        if folder.parts[:1] and folder.parts[0] not in OTHER_FOLDERS and not (PACKAGE / folder).is_dir()
    ] == []
