"""The imports of programs work whatever optional packages are installed beside this library.

A package that does not install here is a stand-in: it can be found, it has a version, and it can be imported.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.packages import write_stand_in
from tests.support.processes import ROOT, script_environment

from accelerate.devices import registry

pytestmark = pytest.mark.clients

# What Transformers asks about too, or that changes what this library offers it.
WITH_TRANSFORMERS = (
    "habana_frameworks.torch",
    "intel_transformer_engine",
    "lomo_optim",
    "megatron.core",
    "msamp",
    "torch_mlu",
    "torch_musa",
    "torch_neuronx",
    "torch_npu",
    "torch_sdaa",
    "torch_xla",
    "transformer_engine",
)
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboardX", "trackio", "wandb")
OTHERS = ("amdsmi", "boto3", "import_timer", "pynvml", "pytorch_triton_xpu", "sagemaker", "schedulefree")
# Transformers, or torch for it, imports the inside of these: a stand-in is not enough.
WITHOUT_TRANSFORMERS = ("timm", "torchvision", "triton")
# What is installed here, and is asked for by clients too: they are imported with it and without.
HIDDEN = ("deepspeed",)
CASES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    **{name: (name,) for name in WITH_TRANSFORMERS},
    "trackers": TRACKERS,
    "others": OTHERS,
    **{name: (name,) for name in WITHOUT_TRANSFORMERS},
    "everything": (*WITH_TRANSFORMERS, *TRACKERS, *OTHERS),
    **{f"without {name}": () for name in HIDDEN},
}
TRANSFORMERS = {"transformers": ("BertModel", "Trainer")}
CLIENTS = {
    **TRANSFORMERS,
    "transformers.integrations.deepspeed": ("HfDeepSpeedConfig", "HfTrainerDeepSpeedConfig"),
    "datasets": ("Dataset", "IterableDataset"),
    "peft": ("PeftModel", "get_peft_model"),
    "diffusers": ("UNet2DModel", "DDPMPipeline"),
    "trl": ("SFTTrainer",),
    "sentence_transformers": ("SentenceTransformer", "SentenceTransformerTrainer"),
}


def clients_of(case: str) -> dict[str, tuple[str, ...]]:
    """Return what is imported beside this library, by module."""
    if case in WITHOUT_TRANSFORMERS:
        return {}
    if case != "nothing" and not case.startswith("without "):
        return TRANSFORMERS
    return {module: names for module, names in CLIENTS.items() if importlib.util.find_spec(module.partition(".")[0])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run the imports of every case, and return the folder of each."""
    pytest.importorskip("transformers")
    made = {case: tmp_path_factory.mktemp("packages") for case in CASES}
    for case, names in CASES.items():
        for name in names:
            write_stand_in(made[case], name)
        hidden = [name for name in HIDDEN if case == f"without {name}"]
        (made[case] / "hidden").write_text(json.dumps(hidden))
        (made[case] / "clients").write_text(json.dumps(clients_of(case)))
    script = ROOT / "tests" / "clients" / "stand_in_script.py"
    subprocess.run([sys.executable, script, *made.values()], env=script_environment(), check=True, timeout=600)
    return made


@pytest.mark.parametrize("case", CASES)
def test_imports_work(case: str, folders: dict[str, Path]) -> None:
    assert (folders[case] / "done").exists(), (folders[case] / "output.txt").read_text()


@pytest.mark.parametrize("name", HIDDEN)
def test_a_package_is_there_or_hidden(name: str, folders: dict[str, Path]) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    assert name in json.loads((folders["nothing"] / "done").read_text())
    assert name not in json.loads((folders[f"without {name}"] / "done").read_text())


def test_every_package_that_is_asked_for_is_among_the_cases_or_installed() -> None:
    asked = {backend.package for backend in registry.all_backends() if backend.package is not None}
    for path in (ROOT / "src" / "accelerate").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("has_package", "is_package_available"):
                asked |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    known = {*HIDDEN, *(name for names in CASES.values() for name in names)}
    assert len(asked) > 30
    assert [name for name in sorted(asked - known) if importlib.util.find_spec(name) is None] == []
