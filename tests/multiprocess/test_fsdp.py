"""Sharded runs on real processes: checkpoints on any number of them, options, and what is refused."""

from __future__ import annotations

import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.logs import logged
from tests.support.processes import run_group
from tests.support.sharding import (
    BY_CLASS,
    STEP_SAMPLES,
    Sharded,
    Words,
    loss_of,
    make_text,
    make_words,
    train_words_plainly,
)
from tests.support.training import fresh_accelerator, group_once, run_checks
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate._base.helpers import reset_warnings
from accelerate.local_sgd import LocalSGD
from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.fsdp.public import fsdp2_prepare_model
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    fsdp2_load_full_state_dict,
    merge_fsdp_weights,
)

pytestmark = pytest.mark.multiprocess

ORIGINAL = {**BY_CLASS, "use_orig_params": True}
VARIANTS: dict[str, Sharded | None] = {
    "2 in shards": Sharded(2, {**BY_CLASS, "state_dict_type": "SHARDED_STATE_DICT"}),
    "2 whole": Sharded(2, {**BY_CLASS, "state_dict_type": "FULL_STATE_DICT"}),
    "1 in shards": Sharded(1, {**BY_CLASS, "state_dict_type": "SHARDED_STATE_DICT"}),
    "1 whole": Sharded(1, {**ORIGINAL, "state_dict_type": "FULL_STATE_DICT"}),
}
IN_SHARDS = {"optimizer_0", "pytorch_model_fsdp_0"}
WHOLE = {"optimizer.bin", "pytorch_model_fsdp.bin"}
CHAIN = (4, 2, 1, 4)
"""How many processes train the first, second ... step; each goes on where the one before stopped."""
CLIP = 1e9


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    model = make_words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(make_text(), batch_size=STEP_SAMPLES // accelerator.num_processes)
    return accelerator.prepare(model, optimizer, loader)  # type: ignore[no-any-return]


def one_step(case: Sharded | None, source: str | None, target: str | None, *, blocking: bool = True) -> float:
    """Load a checkpoint, train one step, save another; return the loss."""
    accelerator = case.accelerator() if case is not None else fresh_accelerator()
    model, optimizer, loader = prepared(accelerator)
    if source is not None:
        accelerator.load_state(source)
    for words, following in loader:
        loss = loss_of(model, words, following)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        break
    if target is not None:
        accelerator.save_state(target, blocking=blocking)
        accelerator.wait_for_save()
    return float(accelerator.gather(loss.detach().reshape(1)).mean())


def step_of_each(folder: str, number: int) -> dict[str, float]:
    """Let every variant train one step of the chain; every other save is in the background."""
    return {
        name: one_step(
            case,
            str(Path(folder, name, str(number - 1))) if number else None,
            str(Path(folder, name, str(number))),
            blocking=number % 2 == 0,
        )
        for name, case in VARIANTS.items()
    }


def cross_over(folder: str) -> dict[str, float]:
    """Load every checkpoint under every strategy; then go on from one without shards in shards."""
    cases = {**VARIANTS, "copies": None}
    last = str(len(CHAIN) - 1)
    losses = {
        f"{saved} -> {loaded}": one_step(case, str(Path(folder, saved, last)), None)
        for saved in VARIANTS
        for loaded, case in cases.items()
    }
    copies = str(Path(folder, "copies"))
    one_step(None, str(Path(folder, "2 in shards", "1")), copies)
    return losses | {f"copies -> {loaded}": one_step(case, copies, None) for loaded, case in VARIANTS.items()}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]], dict[str, float]]:
    folder = tmp_path_factory.mktemp("chain")
    losses = [run_group(step_of_each, size, str(folder), step)[0] for step, size in enumerate(CHAIN)]
    return folder, losses, run_group(cross_over, 2, str(folder))[0]


@cache
def plain_losses() -> list[float]:
    return train_words_plainly(CLIP).losses


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_goes_on_with_any_number_of_processes(name: str, chain: Any) -> None:
    folder, losses, _ = chain
    assert [step[name] for step in losses] == pytest.approx(plain_losses()[: len(CHAIN)], abs=1e-12)
    names = {entry.name for entry in Path(folder, name, "0").iterdir()}
    assert (IN_SHARDS if "shards" in name else WHOLE) < names
    assert "manifest.json" in names


class Broken:
    """A registered object that has no state to give."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def save_with_a_broken_object(folder: str) -> dict[str, str]:
    """Fail on the first rank, which writes registered objects, while the others have shards to write with it."""
    said = {}
    for name in ("2 in shards", "1 in shards"):
        case = VARIANTS[name]
        assert case is not None
        accelerator = case.accelerator()
        _, optimizer, _ = prepared(accelerator)
        accelerator.register_for_checkpointing(Broken())
        for blocking in (True, False):
            try:
                accelerator.save_state(f"{folder}/{name}", blocking=blocking)
                accelerator.wait_for_save()
            except CheckpointError as error:
                said[f"{name}, {blocking}"] = str(error)
        optimizer.step()
    return said


def test_a_rank_that_fails_before_it_writes_shards_stops_the_others(tmp_path: Path) -> None:
    for said in run_group(save_with_a_broken_object, 2, str(tmp_path)):
        assert len(said) == 4
        assert all("Rank 0" in text and "no state today" in text for text in said.values())
    assert not any(tmp_path.iterdir())


def resume_parameters_of_no_model(folder: str) -> dict[str, list[float]]:
    """Train a prompt beside a frozen model, and go back to a saved step: return what momentum it had after each."""
    found = {}
    for name, case in VARIANTS.items():
        assert case is not None
        accelerator = case.accelerator()
        prompt = nn.Parameter(torch.zeros(1, 4))
        frozen = make_words().requires_grad_(False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The parameters of this SGD are in no prepared model")
            _, optimizer = accelerator.prepare(frozen, torch.optim.SGD([prompt], lr=1.0, momentum=0.5))
        momentum = []
        for step in (0, 1, 1):
            if step and len(momentum) == 2:
                accelerator.load_state(f"{folder}/{name}")
            prompt.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            momentum.append(optimizer.state[prompt]["momentum_buffer"].mean().item())
            if not step:
                accelerator.save_state(f"{folder}/{name}")
        found[name] = momentum
    return found


def test_parameters_of_no_model_are_saved_beside_the_shards(tmp_path: Path) -> None:
    for found in run_group(resume_parameters_of_no_model, 2, str(tmp_path)):
        assert found == {name: [1.0, 1.5, 1.5] for name in VARIANTS}


def test_checkpoints_change_between_versions_forms_and_copies(chain: Any) -> None:
    _, _, crossed = chain
    whole = plain_losses()
    expected = {name: whole[2 if name.startswith("copies") else len(CHAIN)] for name in crossed}
    expected |= {name: whole[3] for name in crossed if name.startswith("copies ->")}
    assert crossed == pytest.approx(expected, abs=1e-12)
    assert len(crossed) == len(VARIANTS) * (len(VARIANTS) + 1) + len(VARIANTS)


def test_shards_are_merged_from_the_files_alone(chain: Any, tmp_path: Path) -> None:
    folder, _, _ = chain
    merge_fsdp_weights(Path(folder, "2 in shards", "3"), tmp_path / "merged")
    merge_fsdp_weights(Path(folder, "1 in shards", "3", "pytorch_model_fsdp_0"), tmp_path / "other", False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    other = torch.load(tmp_path / "other" / "pytorch_model.bin", weights_only=True)
    whole = torch.load(Path(folder, "2 whole", "3", "pytorch_model_fsdp.bin"), weights_only=True)
    assert merged.keys() == other.keys() == whole.keys() == make_words().state_dict().keys()
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-14)
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-14)
    fresh = Words().double()
    fresh.load_state_dict(merged)


# --- options, in one group of two processes --------------------------------------------------------------------------


def sharding(version: int = 2, **options: Any) -> Accelerator:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **options)
    return fresh_accelerator(fsdp_plugin=plugin)


def refused(action: Any) -> str:
    try:
        action()
    except ConfigurationError as error:
        return str(error)
    return "nothing was refused"


def ignored_modules_stay_whole() -> dict[str, Any]:
    found = {}
    for version in (1, 2):
        accelerator = sharding(version, ignored_modules="embedding|head")
        model = make_words()
        model.embedding.weight.requires_grad_(False)
        prepared_model = accelerator.prepare(model)
        prepared_model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        found[version] = tuple(model.embedding.weight.shape), type(model.embedding.weight).__name__
    return found


def units_follow_the_policy() -> dict[str, list[str]]:
    from torch.distributed.fsdp import FSDPModule

    policies: dict[str, dict[str, Any]] = {
        "none": {},
        "class": {**BY_CLASS, "transformer_cls_names_to_wrap": "Block,LayerNorm"},
        "function": {"auto_wrap_policy": lambda module: isinstance(module, nn.LayerNorm)},
    }
    found = {}
    for name, options in policies.items():
        model = sharding(2, **options).prepare(make_words())
        found[name] = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
    return found


def a_tied_unit_is_left_to_the_model() -> bool:
    model: Any = sharding(2, auto_wrap_policy=lambda module: isinstance(module, nn.Embedding)).prepare(make_words())
    return model.head.weight is model.embedding.weight


def an_optimizer_may_come_before_its_model() -> bool:
    accelerator = sharding(2, **BY_CLASS)
    model = make_words()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    sharded = accelerator.prepare(model)
    own = [entry for group in optimizer.param_groups for entry in group["params"]]
    return all(left is right for left, right in zip(own, sharded.parameters(), strict=True))


def an_optimizer_of_replaced_parameters_is_refused() -> list[str]:
    found = []
    for name in ("prepare", "prepare_optimizer"):
        # Parameters of ignored modules are not replaced: they do not make up for the others.
        accelerator = sharding(2, **BY_CLASS, ignored_modules="layers.0")
        model = make_words().requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare_model(model)
        found.append(refused(partial(getattr(accelerator, name), optimizer)))
    return found


def joined_parameters_have_one_group() -> str:
    accelerator = sharding(1, **BY_CLASS)
    model = make_words()
    with_decay = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    without = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.SGD([{"params": with_decay}, {"params": without, "weight_decay": 0.0}], lr=0.1)
    return refused(lambda: accelerator.prepare(model, optimizer))


def frozen_and_trained_parameters_of_one_unit() -> tuple[str, list[bool]]:
    def adapted() -> Any:
        model = make_words()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model

    message = refused(lambda: sharding(1, **BY_CLASS, use_orig_params=False).prepare(adapted()))
    trained = []
    for options in (
        {**BY_CLASS, "use_orig_params": True},
        {"auto_wrap_policy": lambda module: isinstance(module, nn.LayerNorm), "use_orig_params": False},
        {**BY_CLASS, "use_orig_params": False, "ignored_modules": r".*\.norm"},
    ):
        model = sharding(1, **options).prepare(adapted())
        model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
        trained.append(any(parameter.grad is not None for parameter in model.parameters()))
    return message, trained


def weights_must_come_from_somewhere() -> str:
    return refused(lambda: sharding(2).prepare(make_words().to("meta")))


def ignored_options_are_named() -> list[str]:
    reset_warnings()
    with logged("means nothing to FSDP 2", times=2) as said:
        for _ in range(2):
            FullyShardedDataParallelPlugin(fsdp_version=2, use_orig_params=True, sync_module_states=True)
    return [message.split("(")[1].split("=")[0] for message in said]


def version_1_has_no_other_axes() -> str:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    sizes = ParallelismConfig(tp_size=2)
    return refused(lambda: fresh_accelerator(fsdp_plugin=plugin, parallelism_config=sizes).prepare(make_words()))


def weights_are_exported() -> list[str] | None:
    accelerator = sharding(2, **BY_CLASS)
    model = accelerator.prepare(make_words())
    weights = accelerator.get_state_dict(model)
    reference = make_words().state_dict()
    same = all(torch.equal(value, reference[name]) for name, value in weights.items())
    return [*weights] if same else None


def elements_are_clipped() -> float:
    accelerator = sharding(2, **BY_CLASS)
    model, _, loader = prepared(accelerator)
    words, following = next(iter(loader))
    accelerator.backward(loss_of(model, words, following))
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    return max(float(entry.grad.full_tensor().abs().max()) for entry in model.parameters())


def blocks_are_compiled_one_by_one() -> dict[str, Any]:
    """Compile blocks that compute their activations again, then shard them; the loss must be that of plain blocks."""
    from torch._dynamo.utils import counters

    options = {**BY_CLASS, "activation_checkpointing": True}
    dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    losses = []
    graphs = []
    for plugin in (None, dynamo):
        counters.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sharded = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
            accelerator = fresh_accelerator(fsdp_plugin=sharded, dynamo_plugin=plugin)
            model, optimizer, loader = prepared(accelerator)
            for words, following in loader:
                loss = loss_of(model, words, following)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return {"same": abs(losses[0] - losses[1]) < 1e-12, "plain": graphs[0], "compiled": graphs[1] > 0}


def full_weights_of_the_first_rank_fill_the_shards() -> dict[bool, Any]:
    found = {}
    for cpu_offload in (False, True):
        accelerator = sharding(2, **BY_CLASS)
        model: Any = fsdp2_prepare_model(accelerator, Words().double())
        assert fsdp2_prepare_model(accelerator, model) is model
        expected = make_words().state_dict()
        fsdp2_load_full_state_dict(accelerator, model, expected if accelerator.is_main_process else {}, cpu_offload)
        weights = {name: value.full_tensor() for name, value in model.named_parameters(remove_duplicate=False)}
        same = all(torch.equal(value, expected[name]) for name, value in weights.items())
        found[cpu_offload] = same, model.head.weight is model.embedding.weight
    return found


def full_weights_that_do_not_fit_are_refused() -> list[str]:
    accelerator = sharding(2)
    model = fsdp2_prepare_model(accelerator, nn.Linear(4, 4))
    messages = []
    for wrong in ({"weight": torch.ones(4, 4)}, {"weight": torch.ones(3, 4), "bias": torch.ones(4)}):
        try:
            fsdp2_load_full_state_dict(accelerator, model, wrong)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def a_model_that_is_sharded_stays_as_it_is() -> list[bool]:
    found = []
    for version in (1, 2):
        accelerator = sharding(version, use_orig_params=True)
        model = accelerator.strategy.wrap(make_words())
        found.append(accelerator.strategy.wrap(model) is model)
    return found


def weights_without_memory_are_initialised_by_a_function() -> tuple[bool, str]:
    def initialise(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)

    with torch.device("meta"):
        model, empty = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    prepared_model = sharding(2, param_init_fn=initialise).prepare(model)
    filled = torch.equal(prepared_model[0].weight.full_tensor(), torch.ones(4, 4))
    return filled, refused(lambda: sharding(2, cpu_ram_efficient_loading=True).prepare(empty))


def averaging_of_replicas_needs_replicas() -> str:
    accelerator = sharding(2)
    return refused(lambda: LocalSGD(accelerator, nn.Linear(2, 2), 4))


OPTIONS = (
    full_weights_of_the_first_rank_fill_the_shards,
    full_weights_that_do_not_fit_are_refused,
    a_model_that_is_sharded_stays_as_it_is,
    averaging_of_replicas_needs_replicas,
    blocks_are_compiled_one_by_one,
    ignored_modules_stay_whole,
    units_follow_the_policy,
    a_tied_unit_is_left_to_the_model,
    an_optimizer_may_come_before_its_model,
    an_optimizer_of_replaced_parameters_is_refused,
    joined_parameters_have_one_group,
    frozen_and_trained_parameters_of_one_unit,
    weights_must_come_from_somewhere,
    ignored_options_are_named,
    version_1_has_no_other_axes,
    weights_are_exported,
    elements_are_clipped,
    weights_without_memory_are_initialised_by_a_function,  # its plugin sets a variable that others read
)


def every_option() -> dict[str, Any]:
    return run_checks(*OPTIONS)


def seen(check: Any) -> list[Any]:
    return [rank[check.__name__] for rank in group_once(every_option, 2)]


def test_ignored_modules_are_not_sharded() -> None:
    assert seen(ignored_modules_stay_whole) == [{1: ((17, 8), "Parameter"), 2: ((17, 8), "Parameter")}] * 2


def test_the_policy_says_what_is_sharded_on_its_own() -> None:
    norms = [f"layers.{index}.norm" for index in range(3)]
    blocks = [name for index in range(3) for name in (f"layers.{index}", norms[index])]
    assert seen(units_follow_the_policy) == [{"none": [""], "class": ["", *blocks], "function": ["", *norms]}] * 2


def test_ties_and_optimizers_are_kept() -> None:
    assert seen(a_tied_unit_is_left_to_the_model) == [True, True]
    assert seen(an_optimizer_may_come_before_its_model) == [True, True]


def test_what_cannot_work_is_refused() -> None:
    for both in seen(an_optimizer_of_replaced_parameters_is_refused):
        assert all("replaced them" in text for text in both)
    assert all("use_orig_params=True" in text for text in seen(joined_parameters_have_one_group))
    assert all("cpu_ram_efficient_loading=True" in text for text in seen(weights_must_come_from_somewhere))
    assert all("fsdp_version=2" in text for text in seen(version_1_has_no_other_axes))


def test_frozen_and_trained_parameters_are_not_joined() -> None:
    messages, trained = zip(*seen(frozen_and_trained_parameters_of_one_unit), strict=True)
    assert all("'layers.0.norm.weight'" in text and "use_orig_params=True" in text for text in messages)
    # A rank may hold no element of a trained parameter.
    assert [any(ranks) for ranks in zip(*trained, strict=True)] == [True, True, True]


def test_options_without_meaning_are_named_once() -> None:
    assert seen(ignored_options_are_named) == [["use_orig_params", "sync_module_states"]] * 2


def test_weights_are_on_the_first_rank() -> None:
    assert seen(weights_are_exported) == [list(make_words().state_dict()), []]
    assert all(0 < value <= 1e-4 for value in seen(elements_are_clipped))


def test_blocks_are_compiled_before_they_are_sharded() -> None:
    assert seen(blocks_are_compiled_one_by_one) == [{"same": True, "plain": 0, "compiled": True}] * 2


def test_full_weights_are_sent_into_shards() -> None:
    assert seen(full_weights_of_the_first_rank_fill_the_shards) == [{False: (True, True), True: (True, True)}] * 2
    for missing, shape in seen(full_weights_that_do_not_fit_are_refused):
        assert "'bias' is not in the checkpoint" in missing
        assert "'weight' has the shape (3, 4) in the checkpoint, not (4, 4)" in shape
        assert "Build the model" in missing
    assert seen(a_model_that_is_sharded_stays_as_it_is) == [[True, True]] * 2


def test_weights_without_memory_come_from_a_function_or_the_first_rank() -> None:
    for filled, text in seen(weights_without_memory_are_initialised_by_a_function):
        assert filled
        assert "has no memory on the first rank" in text
        assert "set param_init_fn" in text


def test_shards_are_not_averaged_as_replicas() -> None:
    assert all(
        "under 'fsdp2'" in text and "Use it with DDP" in text for text in seen(averaging_of_replicas_needs_replicas)
    )
